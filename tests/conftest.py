"""Shared by all tests: no network, quiet libraries, and threads that leave room for the ranks that some tests start."""

import gc
import os
import sys

gc.disable()  # until the tests are collected: what imports make stays, and looking through it again and again is a third of the time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a whole run is three processes and more, and each would compile the package anew
sys.dont_write_bytecode = True  # but not of modules that tests write, and write again within a second
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as ranks are started: on some processors bits depend on threads and company without it


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
