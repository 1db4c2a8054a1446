"""The Transformer underneath: any encoder that `transformers.AutoModel` loads, or a new BERT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertModel, ModernBertConfig, ModernBertModel
from transformers.utils import logging as hf_logging

from pipeline.config import BadInput, require
from pipeline.models import cpu, packing
from pipeline.models.packing import Packing, first_position
from pipeline.models.precision import Precision, resolve_precision
from pipeline.models.settings import Shape, TrainLayers
from pipeline.models.sources import require_fetched
from pipeline.models.tokens import Tokens

ADAPTER = "adapter_config.json"
"""The file of a model that the package peft saved: weights beside those of another model (LoRA)."""
HOW_TO_MERGE = "an adapter of another model; merge it by peft's merge_and_unload and save that"


def new_config(shape: Shape, vocabulary: int, special: Mapping[str, int]) -> Any:
    """The `transformers` config of a new encoder; `special`: ids of the tokens "pad", "cls", "sep"."""
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.positions,
        "initializer_range": shape.init_std,
        "pad_token_id": special["pad"],
    }
    if shape.architecture == "bert":
        return BertConfig(
            **common,
            intermediate_size=shape.intermediate or 4 * shape.width,
            hidden_dropout_prob=shape.dropout,
            attention_probs_dropout_prob=shape.dropout,
        )
    return ModernBertConfig(
        **common,
        # Gated: 2 × the width holds as many weights as 4 × without a gate.
        intermediate_size=shape.intermediate or 2 * shape.width,
        global_attn_every_n_layers=shape.global_attention_every,
        embedding_dropout=shape.dropout,
        mlp_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        initializer_cutoff_factor=3.0,
        cls_token_id=special["cls"],
        sep_token_id=special["sep"],
        bos_token_id=None,
        eos_token_id=None,
    )


class TextEncoder(nn.Module):
    """The part of a network that computes in the ranker's precision; heads are always float32."""

    packs = False
    """Whether an `Encoder` computes texts of several lengths as one row, without padding:
    `prepare_for_training`, and on a CPU `inference.prepare`."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return next(self.parameters()).dtype


class Encoder(TextEncoder):
    """tokens → hidden_BTD. `hf` is the plain `transformers` model, saved by `save_pretrained`."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        if getattr(hf, "pooler", None) is not None:
            hf.pooler = None  # never used here; DDP would wait for its gradients
        self.segments = getattr(hf.config, "type_vocab_size", 0) > 1
        self._in_bf16 = False

    @classmethod
    def new(cls, shape: Shape, vocabulary: int, special: Mapping[str, int]) -> Encoder:
        """An encoder with random weights; `special` as in `new_config`."""
        config = new_config(shape, vocabulary, special)
        if shape.architecture == "bert":
            return cls(BertModel(config, add_pooling_layer=False))
        return cls(ModernBertModel(config))

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """Loads a local `transformers` directory (safetensors only).

        Raises BadInput where there is no such model.
        """
        hf, missing = load_pretrained(AutoModel, folder)
        if missing := [name for name in missing if "pooler" not in name]:
            raise BadInput(f"{folder}: the weights lack {len(missing)} of the model's tensors, "
                           f"among them {missing[0]}")  # fmt: skip
        return cls(hf)

    def save(self, folder: Path) -> None:
        _quiet()
        self.hf.save_pretrained(str(folder), safe_serialization=True)

    @property
    def width(self) -> int:
        return int(self.hf.config.hidden_size)

    @property
    def positions(self) -> int:
        """Tokens in a sequence at most."""
        return int(self.hf.config.max_position_embeddings) - first_position(self.hf)

    def recompute_layers(self) -> None:
        """Gradient checkpointing: keeps a layer's input only, and computes the layer again on the way
        back. A step takes a third longer.

        Raises BadInput for an architecture that cannot.
        """
        try:
            self.hf.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise BadInput(f"gradient checkpointing: {error}") from None

    def keep_bf16(self) -> None:
        """Lets layers hand bf16 to each other under autocast on a GPU; what leaves the encoder is float32."""
        for part in self.hf.modules():
            if type(part) is nn.LayerNorm:
                part.__class__ = _Bf16Norm
        self._in_bf16 = True

    def copy_first_segment(self) -> None:
        """Gives the second text of a pair the segment embedding of the first, where there are any."""
        if self.segments:
            table = self.hf.embeddings.token_type_embeddings.weight
            with torch.no_grad():
                table[1:] = table[:1]

    def forward(self, tokens: Tokens) -> Tensor:
        """[B, T, D]; the values at padding are undefined, so every use of them is masked."""
        if self._is_packed([tokens]):
            return self._forward_packed([tokens])[0]
        hidden_BTD: Tensor = self.hf(
            **self._inputs(tokens), attention_mask=tokens.mask_BT.long()
        ).last_hidden_state
        return hidden_BTD.float() if self._in_bf16 else hidden_BTD

    def forward_together(self, batches: Sequence[Tokens]) -> list[Tensor]:
        """`forward` of each batch; of all texts at once where they are packed. Of a small encoder's step on a
        GPU most time is taken by starting kernels, and so there are half as many."""
        if self._is_packed(batches):
            return self._forward_packed(batches)
        return [self(tokens) for tokens in batches]

    def _is_packed(self, batches: Sequence[Tokens]) -> bool:
        """Whether one row has fewer tokens than the batches with their padding."""
        # A GPU has no use for it in evaluation, where batches come sorted. The compiler would compile every
        # batch's lengths anew.
        is_of_use = self.training or batches[0].ids_BT.device.type == "cpu"
        if not self.packs or not is_of_use or torch.compiler.is_compiling():
            return False
        tokens = sum(sum(batch.lengths) for batch in batches)
        return packing.row_tokens(tokens) < sum(batch.ids_BT.numel() for batch in batches)

    def _inputs(self, tokens: Tokens) -> dict[str, Tensor]:
        segments_BT = tokens.segments_BT if self.segments else None
        inputs = {"input_ids": tokens.ids_BT}
        return inputs if segments_BT is None else {**inputs, "token_type_ids": segments_BT}

    def _forward_packed(self, batches: Sequence[Tokens]) -> list[Tensor]:
        """The packing travels as an argument that models hand on to their attention, so that layers which
        gradient checkpointing computes again find it. A mask of four dimensions is used as it is, so none
        is made of the row's length squared."""
        device = batches[0].ids_BT.device
        packing = Packing.of(
            [tokens.lengths for tokens in batches], [tokens.ids_BT.shape[1] for tokens in batches]
        ).to(device)
        inputs = [self._inputs(tokens) for tokens in batches]
        row: Tensor = self.hf(
            **{name: packing.pack([each[name] for each in inputs]) for name in inputs[0]},
            position_ids=packing.position_R[None] + first_position(self.hf),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.long, device=device),
            packing=packing,
        ).last_hidden_state
        return packing.unpack(row.float() if self._in_bf16 else row)


class _Bf16Norm(nn.LayerNorm):
    """Sums in float32, as each norm on a GPU. Autocast would have it read and write float32, too, and so all
    that lies between a layer's products."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.bfloat16() for p in (self.weight, self.bias))
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.layer_norm(
                hidden.bfloat16(), self.normalized_shape, weight, bias, self.eps
            )


def load_pretrained(kind: Any, folder: Path) -> tuple[Any, list[str]]:
    """A model that `kind`, such as AutoModel, loads from a local directory (safetensors only), in
    float32, and the names of the weights that the directory lacks.

    Raises BadInput where there is no such model.
    """
    # With peft, transformers would look for the other model; without it, leave the adapter out.
    if (folder / ADAPTER).exists():
        raise BadInput(f"{folder}: {ADAPTER} is {HOW_TO_MERGE}")
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder}: not a model directory (config.json is missing)")
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        raise BadInput(f"{folder}: the model has no weights (*.safetensors is missing; pickles such "
                       "as pytorch_model.bin are never loaded)")  # fmt: skip
    for path in weights:
        require_fetched(path)
    _quiet()  # the caller reports what is missing, in one line
    try:
        hf, report = kind.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"{folder}: no model to load ({str(error).splitlines()[0]})") from None
    if hf.config.is_encoder_decoder:
        raise BadInput(f"{folder}: {type(hf).__name__} is no encoder; allowed: models with "
                       "encoder layers only, such as BERT")  # fmt: skip
    return hf, sorted(report["missing_keys"])


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises BadInput for another file."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise BadInput(f"{path}: not to be read ({error})") from None
    return tensors


def freeze(encoder: Encoder, train: TrainLayers) -> None:
    """Leaves only the layers that `train` names to be trained, and what stands above them.

    Raises BadInput for an encoder whose layers share their weights, such as ALBERT.
    """
    if train == "all":
        return
    layers = _layers(encoder, "finetune.train_layers", train, "all")
    trained_count = {"all_but_embeddings": len(layers), "top4": 4, "top": 1}[train]
    encoder.hf.requires_grad_(False)
    for layer in layers[max(0, len(layers) - trained_count) :]:
        layer.requires_grad_(True)
    parts = list(encoder.hf.children())
    holder = next(
        number
        for number, part in enumerate(parts)
        if any(layers is module for module in part.modules())
    )
    for part in parts[holder + 1 :]:  # such as BERT's pooler and ModernBERT's last norm
        part.requires_grad_(True)


def shorten(encoder: Encoder, depth: int) -> None:
    """Leaves the first `depth` layers only, and a config that says so.

    Raises BadInput where there are fewer.
    """
    layers, config = _layers(encoder, "finetune.keep_layers", depth, "0"), encoder.hf.config
    require(1 <= depth <= len(layers), "finetune.keep_layers", depth,
            f"0 to {len(layers)}, the encoder's layers")  # fmt: skip
    del layers[depth:]
    if getattr(config, "layer_types", None):  # the only other setting that has a value for each
        config.layer_types = config.layer_types[:depth]
    config.num_hidden_layers = depth


def _layers(encoder: Encoder, option: str, value: object, allowed: str) -> nn.ModuleList:
    """Raises BadInput, naming the option that needs them, where the encoder has none of its own."""
    config = encoder.hf.config
    for part in encoder.hf.modules():
        if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers:
            return part
    raise BadInput(f"{option}: {value!r} is not allowed; allowed: {allowed}, as the layers of an encoder of "
                   f"type {config.model_type!r} share their weights")  # fmt: skip


def add_adapters(encoder: Encoder, rank: int, alpha: float) -> list[nn.Parameter]:
    """LoRA (Hu et al., ICLR 2022): freezes the encoder's weights W [out, in], and gives each of its linear
    layers an adapter, a product that is added to them: W + alpha / rank · B A, with A [rank, in] and B [out,
    rank]. It changes nothing at first: A is random, B is 0. Returns the adapters' weights.

    Raises BadInput where the package peft is not installed.
    """
    if not find_spec("peft"):
        message = f"finetune.lora_rank: {rank} needs the package peft; pip install -e '.[lora]'"
        raise BadInput(message)
    from peft import LoraConfig, inject_adapter_in_model

    # peft's own choice, queries and values, is made for some architectures only, not for ModernBERT.
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    inject_adapter_in_model(config, encoder.hf)
    return [value for value in encoder.hf.parameters() if value.requires_grad]


def merge_adapters(encoder: Encoder) -> None:
    """Adds the adapters to the encoder's weights, and leaves the plain `transformers` model."""
    from peft.tuners.lora import LoraLayer

    for name, part in list(encoder.hf.named_modules()):
        if isinstance(part, LoraLayer):
            part.merge()
            encoder.hf.set_submodule(name, part.get_base_layer())
    encoder.hf.requires_grad_(True)


def set_dropout(module: nn.Module, share: float) -> None:
    """Changes the dropout of a model that is loaded; what it saves keeps the original's setting."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = share
        if isinstance(getattr(part, "attention_dropout", None), float):
            setattr(part, "attention_dropout", share)  # noqa: B010 - nn.Module types it a Tensor


def has_dropout(module: nn.Module) -> bool:
    """Whether a part of it drops anything in training."""
    return any(
        (isinstance(part, nn.Dropout) and part.p > 0)
        or (isinstance(share := getattr(part, "attention_dropout", None), float) and share > 0)
        for part in module.modules()
    )


def prepare_for_training(
    module: nn.Module, device: torch.device, precision: Precision = "auto"
) -> None:
    """Chooses the implementation of every encoder in `module`, before it is wrapped or compiled.

    On a CPU: `cpu.accelerate`. On a GPU in bf16: norms that read and write bf16; and, as their kernels take
    no float32, FlashAttention-2 where the package `flash_attn` is installed and the model knows it, else rows
    without padding, where the model knows them and has no dropout. Else: the library's default, SDPA. Such
    models are validated under bf16 autocast, too.
    """
    on_gpu = device.type == "cuda" and resolve_precision(precision, device) == "bf16"
    for part in module.modules():
        if not isinstance(part, Encoder):
            continue
        if on_gpu:
            part.keep_bf16()
        if device.type == "cpu":
            part.packs = cpu.accelerate(part.hf)
        elif on_gpu and find_spec("flash_attn") and part.hf._supports_flash_attn:
            part.hf.set_attn_implementation("flash_attention_2")
        elif on_gpu and packing.fits(part.hf) and not has_dropout(part):
            packing.set_gpu_attention(part.hf)
            part.packs = True


def _quiet() -> None:
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
