"""The classes of an attention backend of vLLM 0.33: its capabilities, the metadata of a batch, and a layer's attention.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as triton_ops
from vllm.v1.kv_cache_interface import get_kv_quant_mode, is_quantized_kv_cache

from .. import masks
from ..varlen import flash_attn_varlen_func
from . import NAME

__all__ = ["Fa3Backend", "Fa3Impl", "Fa3Metadata", "Fa3MetadataBuilder"]

# Attention types of encoders, whose keys are not in a cache.
_ENCODERS = {AttentionType.ENCODER, AttentionType.ENCODER_ONLY}
# The largest head size of a cache with a scale for each token and head.
_LARGEST_WITH_SCALES = 256
# Bytes behind K and V of a token and head with scales: both scales, float32, and as many bytes again. Kernels copy rows
# that begin at multiples of 16 bytes.
_BYTES_OF_SCALES = 16


class Fa3Backend(AttentionBackend):
    """The capabilities of this package's attention. vLLM refuses a model that needs anything else."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_per_token_head",
        "int8_per_token_head",
    ]
    forward_includes_kv_cache_update = False
    # Attention over a cache reads keys from the cache only.
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["Fa3Impl"]:
        return Fa3Impl

    @staticmethod
    def get_builder_cls() -> type["Fa3MetadataBuilder"]:
        return Fa3MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Kernels take any number of rows, and are fast with multiples of 8. vLLM's pages have multiples of 16."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Adds the scales of tokens and heads to a layer's cache."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + _BYTES_OF_SCALES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 512

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        if kv_cache_dtype is None or not is_quantized_kv_cache(kv_cache_dtype):
            return None
        if use_mm_prefix:
            return f"images that see themselves need a cache of 16 bits, not of {kv_cache_dtype}"
        if head_size % 16 != 0:
            return f"a cache of {kv_cache_dtype} has a head size that is a multiple of 16, not {head_size}"
        if get_kv_quant_mode(kv_cache_dtype).is_per_token_head and head_size > _LARGEST_WITH_SCALES:
            return f"a cache of {kv_cache_dtype} has a head size of at most {_LARGEST_WITH_SCALES}, not {head_size}"
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability == DeviceCapability(9, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class Fa3Metadata(AttentionMetadata):
    """The metadata of a batch, as arguments of `flash_attn_varlen_func`. Tensors are vLLM's own, on the GPU."""

    # Rows of Q, without the rows that pad a batch to the size of a captured graph.
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    # int32 (sequences + 1,): cu_seqlens of the rows of Q.
    query_start_loc: Tensor
    # int32 (sequences,): the number of keys in the cache, including the keys of this step.
    seq_lens: Tensor
    # int32 (sequences, pages): the pages of each sequence.
    block_table: Tensor
    # int64 (rows,): the row of the cache to which each new key goes; negative if it goes nowhere.
    slot_mapping: Tensor
    # Whether sequences are causal, or bool (sequences,).
    causal: bool | Tensor
    # int32 (sequences, spans, 2): the images of each sequence, as `fa3.masks.with_spans` takes them. vLLM clears the
    # attribute of this name for layers whose images do not see themselves.
    mm_prefix_range_tensor: Tensor | None = None
    # The masks made of these spans, by the keys before a row that layers' windows show.
    intervals: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, left: int) -> Tensor | None:
        """The mask of a layer, if there are images. All layers with one window share it."""
        spans = self.mm_prefix_range_tensor
        if spans is None:
            return None
        if left not in self.intervals:
            rows = masks.packed(self.query_start_loc, self.num_actual_tokens, seqused_k=self.seq_lens)
            self.intervals[left] = masks.with_spans(spans, *rows, left)
        return self.intervals[left]


class Fa3MetadataBuilder(AttentionMetadataBuilder[Fa3Metadata]):
    """Makes the metadata of a batch from vLLM's own tensors, since kernels read all lengths on the GPU."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs of models with images are captured of batches that decode, whose rows are in no image."""
        has_images = vllm_config.model_config.is_mm_prefix_lm
        return AttentionCGSupport.UNIFORM_BATCH if has_images else cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Fa3Metadata:
        if common_prefix_len:
            raise NotImplementedError(f"cascade attention over a prefix of {common_prefix_len} keys is not supported")
        common = common_attn_metadata
        spans = _spans(common)
        if spans is not None and isinstance(common.causal, Tensor):
            raise NotImplementedError("causal is a tensor, and there are images that see themselves")
        return Fa3Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            mm_prefix_range_tensor=spans,
        )

    def update_block_table(self, metadata: Fa3Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Fa3Metadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: Fa3Metadata) -> None:
        """Does nothing: kernels read the lengths from vLLM's tensors, also in a captured graph."""


def _spans(common: CommonAttentionMetadata) -> Tensor | None:
    """The images of each sequence, int32 (sequences, spans, 2), or None if no new row is in an image. vLLM's lists
    give the first and the last key of each.
    """
    given = common.mm_req_doc_ranges
    if not given:
        return None
    ends, keys = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
    assert keys is not None
    images = []
    for i in range(len(ends) - 1):
        new = int(keys[i]) - (ends[i + 1] - ends[i])
        images.append([[first, last + 1] for first, last in given.get(i, ()) if last >= new])
    spans = max(map(len, images))
    if not spans:
        return None
    padded = torch.tensor([x + [[0, 0]] * (spans - len(x)) for x in images], dtype=torch.int32)
    device = common.query_start_loc.device
    return padded.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else padded


class Fa3Impl(AttentionImpl[Fa3Metadata]):
    """The attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError("alibi_slopes are not supported")
        self.is_quantized = is_quantized_kv_cache(kv_cache_dtype)
        self.quant_mode = get_kv_quant_mode(kv_cache_dtype)
        self.is_encoder = attn_type in _ENCODERS
        if self.is_quantized and self.is_encoder:
            raise NotImplementedError(f"attention of an encoder has no cache that could be {kv_cache_dtype}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        # vLLM's window counts the row's own key.
        self.left = -1 if sliding_window is None else sliding_window - 1
        self.soft_cap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.split_keys: Literal["fixed"] | None = "fixed" if envs.VLLM_BATCH_INVARIANT else None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Fa3Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the rows of a batch, over the keys that `do_kv_cache_update` put into the cache before.

        Arguments:
            layer: its `_k_scale` and `_v_scale` are the scales of an 8-bit cache, float32 () or (heads_kv,).
            query: (tokens, heads, head_size), float16 or bfloat16.
            key, value: (tokens, heads_kv, head_size). Only an encoder's attention reads them.
            kv_cache: (pages, heads_kv, page_rows, 2 * head_size), with any strides: K and V are the halves of its last
                dimension. uint8, float8_e4m3fn or int8, if it is an 8-bit cache. With scales of tokens and heads its
                last dimension is longer (`Fa3Backend.customize_spec`).
            attn_metadata: None in a profiling run, whose O is 0.
            output: O, (tokens, heads, head_size), which is returned. Rows of no token are 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantization of O in the kernel is not supported")
        if attn_metadata is None:
            return output.fill_(0)
        rows, ends = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        causal: bool | Tensor = False if self.is_encoder else attn_metadata.causal
        # Without a causal mask the window has the same width to the right as to the left.
        window = self.left, 0 if causal is True else self.left
        intervals = attn_metadata.mask(self.left) if causal is True else None
        if intervals is not None:
            # They are the whole mask.
            causal, window = False, (-1, -1)
        scores: dict[str, Any] = dict(
            softmax_scale=self.scale,
            causal=causal,
            window_size=window,
            softcap=self.soft_cap,
            s_aux=self.sinks,
            out=output[:rows],
            split_keys=self.split_keys,
            intervals=intervals,
        )
        longest = attn_metadata.max_query_len
        if self.is_encoder:
            assert key is not None and value is not None
            flash_attn_varlen_func(query[:rows], key[:rows], value[:rows], ends, ends, longest, longest, **scores)
            return output
        keys, values, *of_tokens = self._parts(kv_cache)
        if of_tokens:
            scores |= zip(("k_descale", "v_descale"), of_tokens)
        elif self.is_quantized:
            shape = ends.shape[0] - 1, self.num_kv_heads
            scores |= dict(k_descale=layer._k_scale.expand(shape), v_descale=layer._v_scale.expand(shape))
        flash_attn_varlen_func(
            query[:rows],
            keys,
            values,
            ends,
            None,
            longest,
            attn_metadata.max_seq_len,
            seqused_k=attn_metadata.seq_lens,
            page_table=attn_metadata.block_table,
            # 0 lets kernels split the keys of a sequence over CTAs; the function's default does not.
            num_splits=0,
            **scores,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new keys and values to the cache, by vLLM's own kernel."""
        if self.is_encoder:
            return
        if self.quant_mode.is_per_token_head:
            # This kernel writes as many rows as there are keys.
            new = key[: slot_mapping.shape[0]], value[: slot_mapping.shape[0]]
            write = triton_ops.triton_reshape_and_cache_flash_per_token_head_quant
            write(*new, *self._parts(kv_cache), slot_mapping, kv_quant_mode=self.quant_mode)
            return
        keys, values = kv_cache.transpose(1, 2).tensor_split((self.head_size,), dim=-1)
        scales = layer._k_scale, layer._v_scale
        ops.reshape_and_cache_flash(key, value, keys, values, slot_mapping, self.kv_cache_dtype, *scales)

    def _parts(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """K and V, (pages, page_rows, heads_kv, head_size), and the scales of K's and V's tokens, float32 (pages,
        page_rows, heads_kv), if there are some.
        """
        kv_cache, scales = kv_cache.transpose(1, 2).tensor_split((2 * self.head_size,), dim=-1)
        if self.is_quantized and kv_cache.dtype != torch.int8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        halves = kv_cache.tensor_split((self.head_size,), dim=-1)
        return (*halves, *scales.view(torch.float32).unbind(-1)[:2]) if self.quant_mode.is_per_token_head else halves
