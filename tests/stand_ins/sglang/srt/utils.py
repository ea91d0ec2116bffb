"""Tensors through the pickler that shares their memory, as between processes."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any


class MultiprocessingSerializer:
    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> bytes:
        assert not output_str
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(obj)
        return buffer.getvalue()

    @staticmethod
    def deserialize(data: bytes) -> Any:
        return pickle.loads(data)
