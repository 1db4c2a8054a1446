"""sentence-transformers on another engine. Runs by its own Python, which has none of polyrank's packages.

PYTHON engine_peer.py embed|rerank torch|openvino|onnx|onnx-int8 MODEL TEXTS

It says "ready", and makes one pass over the texts, a JSON list in the file TEXTS, for each line on standard
input; a line on standard output says that it has ended. The first text of rerank is the query of the others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(task: str, engine: str, model: str, file: str) -> None:
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.backend import export_dynamic_quantized_onnx_model

    texts = json.loads(Path(file).read_text())
    backend: Any = engine.partition("-")[0]
    kind: Any = SentenceTransformer if task == "embed" else CrossEncoder
    loaded = kind(model, backend=backend, device="cpu")
    if engine == "onnx-int8":
        with tempfile.TemporaryDirectory() as folder:
            has_vnni = torch.cpu.get_capabilities().get("avx512_vnni")
            kind_of_processor = "avx512_vnni" if has_vnni else "avx2"
            export_dynamic_quantized_onnx_model(loaded, kind_of_processor, folder)
            name = next(Path(folder).rglob("*.onnx")).relative_to(folder).as_posix()
            loaded.save_pretrained(folder)
            loaded = kind(folder, backend="onnx", device="cpu", model_kwargs={"file_name": name})
    if task == "embed":
        loaded.max_seq_length = 256
    print("ready", flush=True)
    for _ in sys.stdin:
        if task == "rerank":
            loaded.predict([(texts[0], text) for text in texts[1:]], show_progress_bar=False)
        else:
            loaded.encode(texts, show_progress_bar=False)
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
