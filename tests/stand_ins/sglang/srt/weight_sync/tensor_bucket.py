"""Several tensors as one flat tensor of bytes, with what is needed to take them apart."""

from dataclasses import dataclass

import torch


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class FlattenedTensorBucket:
    supports_multi_dtypes = True

    def __init__(self, named_tensors=None, flattened_tensor=None, metadata=None) -> None:
        if named_tensors is None:
            self.flattened, self.metadata = flattened_tensor, metadata
            return
        if not named_tensors:
            raise ValueError("Cannot create empty tensor bucket")
        pieces = [tensor.flatten().view(torch.uint8) for _, tensor in named_tensors]
        self.metadata, start = [], 0
        for (name, tensor), piece in zip(named_tensors, pieces, strict=True):
            self.metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + piece.numel(), piece.numel()))
            start += piece.numel()
        self.flattened = torch.cat(pieces)

    def get_flattened_tensor(self):
        return self.flattened

    def get_metadata(self):
        return self.metadata

    def reconstruct_tensors(self):
        return [(m.name, self.flattened[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)) for m in self.metadata]
