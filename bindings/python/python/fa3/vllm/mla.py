"""The classes of an attention backend of vLLM 0.33 for multi-head latent attention (MLA).

Decoding reads vLLM's cache of latent vectors, in 16 bits or e4m3, in place: a row has kv_lora_rank latent columns,
which are keys and values, and qk_rope_head_dim rotated columns, which are keys only. Prompts are computed with all
heads' keys and values by `Fa3MLAPrefill`, whose parts vLLM combines by LSE.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from ..varlen import flash_attn_varlen_func

__all__ = ["Fa3MLABackend", "Fa3MLAImpl", "Fa3MLAMetadata", "Fa3MLAMetadataBuilder", "Fa3MLAPrefill", "latent"]

# Columns that stand for the rotated ones of a model that has none: kernels take at least 8.
_NO_ROTATED_COLUMNS = 64


def latent(
    q: Tensor | tuple[Tensor, Tensor],
    cache: Tensor,
    kv_lora_rank: int,
    scale: float,
    ends: Tensor,
    longest: int,
    lengths: Tensor,
    capacity: int,
    table: Tensor,
    with_lse: bool,
    cache_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of packed rows over a cache of latent vectors.

    Arguments:
        q: latent columns (tokens, heads, kv_lora_rank) and rotated columns (tokens, heads, qk_rope_head_dim), or one
            tensor with both.
        cache: (pages, page_rows, kv_lora_rank + qk_rope_head_dim), in q's dtype, or float8_e4m3fn.
        ends: int32 (sequences + 1,), the offsets of the sequences in q; `longest` bounds their numbers of rows.
        lengths: int32 (sequences,), the rows of the cache in use; `capacity` bounds them.
        table: int32 (sequences, pages), the pages of each sequence.
        cache_scale: the factor on codes of float8_e4m3fn, float32 (); 1 if None.

    Returns: O (tokens, heads, kv_lora_rank) and, if wanted, LSE (tokens, heads), the natural logarithm.
    """
    q_latent, q_rotated = q if isinstance(q, tuple) else q.tensor_split((kv_lora_rank,), dim=-1)
    values, keys = cache.unsqueeze(2).tensor_split((kv_lora_rank,), dim=-1)
    if not q_rotated.shape[-1]:
        q_rotated = q_latent.new_zeros(*q_latent.shape[:-1], _NO_ROTATED_COLUMNS)
        keys = values[..., :_NO_ROTATED_COLUMNS]
    scale_of_heads = None if cache_scale is None else cache_scale.expand(len(lengths), 1)
    result = flash_attn_varlen_func(
        q_rotated,
        keys,
        values,
        ends,
        None,
        # A graph may be captured with a batch that has no rows.
        max(longest, 1),
        capacity,
        seqused_k=lengths,
        page_table=table,
        qv=q_latent,
        k_descale=scale_of_heads,
        v_descale=scale_of_heads,
        # The function's default does not split the keys of a sequence over CTAs.
        num_splits=0,
        softmax_scale=scale,
        causal=True,
        return_attn_probs=with_lse,
    )
    return (result, None) if isinstance(result, Tensor) else (result[0], result[1].T)


def refuse(alibi_slopes: Any, sliding_window: Any, logits_soft_cap: Any, attn_type: str) -> None:
    """Refuses options of a layer that latent attention does not have."""
    options = dict(alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap)
    for name, value in options.items():
        if value:
            raise NotImplementedError(f"{name} is not supported in latent attention")
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(f"latent attention of type {attn_type} is not supported, expected a decoder's")


class Fa3MLABackend(MLACommonBackend):
    """The capabilities of this package's latent attention. vLLM refuses a model that needs anything else."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        # vLLM looks its backends up by this name. This class takes the place of vLLM's own one.
        return "FLASH_ATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type["Fa3MLAImpl"]:
        return Fa3MLAImpl

    @staticmethod
    def get_builder_cls() -> type["Fa3MLAMetadataBuilder"]:
        return Fa3MLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability == DeviceCapability(9, 0)


@dataclass
class Fa3MLADecodeMetadata(MLACommonDecodeMetadata):
    """The sequences of a batch that decode, as arguments of `latent`."""

    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int


@dataclass
class Fa3MLAMetadata(MLACommonMetadata[Fa3MLADecodeMetadata]):
    """vLLM's metadata of a batch."""


class Fa3MLAMetadataBuilder(MLACommonMetadataBuilder[Fa3MLAMetadata]):
    """Makes the metadata of a batch from vLLM's own tensors, since kernels read all lengths on the GPU."""

    # vLLM's builder captures graphs of batches that decode.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # Up to this number of new rows, a sequence is computed over the latent cache.
    reorder_batch_threshold: int = 512

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, Fa3MLAMetadata)

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> Fa3MLADecodeMetadata:
        return Fa3MLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )


class Fa3MLAImpl(MLACommonImpl[Fa3MLAMetadata]):
    """The latent attention of a layer. vLLM's base class computes prompts by an `MLAPrefillBackend`."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        refuse(alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.supports_quant_query_input = False
        self.is_quantized = is_quantized_kv_cache(kv_cache_dtype)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Fa3MLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """O (tokens, heads, kv_lora_rank) of the sequences that decode, and LSE (tokens, heads) where vLLM needs it."""
        decode = attn_metadata.decode
        assert decode is not None
        cache, cache_scale = kv_c_and_k_pe_cache, None
        if self.is_quantized:
            cache, cache_scale = cache.view(torch.float8_e4m3fn), layer._k_scale
        return latent(
            q,
            cache,
            self.kv_lora_rank,
            self.scale,
            decode.query_start_loc,
            decode.max_query_len,
            decode.seq_lens,
            decode.max_seq_len,
            decode.block_table,
            self.need_to_return_lse_for_decode,
            cache_scale,
        )


class Fa3MLAPrefill(MLAPrefillBackend):
    """The attention of prompts in models with latent attention, with keys and values of all heads."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        return device_capability == DeviceCapability(9, 0)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        head_dim = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return (head_dim, mla_dimensions.v_head_dim) == (192, 128) or (
            head_dim == mla_dimensions.v_head_dim <= 256 and head_dim % 8 == 0 < head_dim
        )

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention of the new tokens to each other: O (tokens, heads, v_head_dim), and LSE (heads, tokens)."""
        if output_scale is not None:
            raise NotImplementedError("quantization of O in the kernel is not supported")
        batch = self._prefill_metadata
        ends, longest = batch.query_start_loc, batch.max_query_len
        options: dict[str, Any] = dict(causal=True, return_attn_probs=return_softmax_lse, out=out)
        return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, softmax_scale=self.scale, **options)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of the new tokens to a part of the tokens before them, all of which they see: O and LSE."""
        lists = chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        result = flash_attn_varlen_func(q, k, v, *lists, softmax_scale=self.scale, return_attn_probs=True, out=out)
        assert isinstance(result, tuple)
        return result
