"""GRPO in one screen of plain transformers and torch: what a step costs when nothing is planned, checked, logged or resumed.

    python -m benchmarks.plain_loop WORKLOAD FOLDER          prints JSON: seconds of each step

One process, one device. A side of `python -m benchmarks.against`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workloads import WORKLOADS, even_share, prepare


def main() -> None:
    workload = WORKLOADS[sys.argv[1]]
    if workload.ends_early:
        raise SystemExit("the plain loop samples to the full length: no side of this workload")
    path, prompts = prepare(workload, Path(sys.argv[2]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, workload.dtype)).to(device)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=workload.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    seconds = []
    for step in range(workload.warm_up + workload.steps):
        start = time.perf_counter()
        asked = tokenizer(texts[step * workload.prompts : (step + 1) * workload.prompts], return_tensors="pt", padding=True).to(device)
        many = {name: tensor.repeat_interleave(workload.samples, 0) for name, tensor in asked.items() if name != "token_type_ids"}
        length = many["input_ids"].shape[1]
        with torch.no_grad():
            made = model.generate(
                **many, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=workload.new_tokens, min_new_tokens=workload.new_tokens
            )
        answers = made[:, length:]
        rewards = torch.tensor([even_share(text) for text in tokenizer.batch_decode(answers)], device=device)
        groups = rewards.view(-1, workload.samples)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)
        for rows in torch.arange(workload.rows, device=device).split(workload.rows_at_once):
            logits = model(made[rows], logits_to_keep=answers.shape[1] + 1).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, answers[rows, :, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio * advantages[rows, None]).sum() / answers.numel()).backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    print(json.dumps({"seconds": seconds, "peak_gib": peak}))


if __name__ == "__main__":
    main()
