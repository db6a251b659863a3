"""The classes of an attention backend of vLLM 0.33 for multi-head latent attention (MLA).

Decoding reads vLLM's cache of latent vectors, in 16 bits or e4m3, in place: a row has kv_lora_rank latent columns,
which are keys and values, and qk_rope_head_dim rotated columns, which are keys only. `Fa3MLAPrefill` computes prompts
from the keys and values of all heads, in parts that vLLM combines by LSE.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
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

__all__ = ["Fa3MLABackend", "Fa3MLAImpl", "Fa3MLAMetadata", "Fa3MLAMetadataBuilder", "Fa3MLAPrefill"]

# vLLM's names of caches of e4m3.
_E4M3 = ["fp8", "fp8_e4m3"]


class Fa3MLABackend(MLACommonBackend):
    """The capabilities of this package's latent attention. vLLM refuses a model that needs anything else."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_E4M3]

    @staticmethod
    def get_name() -> str:
        # vLLM looks its backends up by this name. This class takes the place of vLLM's own class.
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
    """The sequences of a batch that decode. Each has seq_lens rows of the cache in pages of block_table."""

    # int32 (sequences + 1,): where each sequence begins in Q; max_query_len bounds the numbers of its rows.
    query_start_loc: Tensor
    max_query_len: int
    # A bound of seq_lens.
    max_seq_len: int


@dataclass
class Fa3MLAMetadata(MLACommonMetadata[Fa3MLADecodeMetadata]):
    """vLLM's metadata of a batch."""


class Fa3MLAMetadataBuilder(MLACommonMetadataBuilder[Fa3MLAMetadata]):
    """Makes the metadata of a batch from vLLM's own tensors, since kernels read all lengths on the GPU."""

    # vLLM's builder captures graphs of decoding batches.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # A sequence with up to this number of new rows is computed over the latent cache. With decode context parallelism
    # vLLM's builder makes it 1: a rank has keys of all positions, and a causal mask over them is right for one row.
    reorder_batch_threshold: int = 512

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, Fa3MLAMetadata)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        is_sharded = vllm_config.parallel_config.decode_context_parallel_size > 1
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if is_sharded else cls._cudagraph_support

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


class Fa3MLALayer:
    """A base of the classes of layers. It refuses what latent attention does not have, and computes attention over a
    cache of latent vectors.
    """

    # The quantized caches that it reads.
    quantized_caches: ClassVar[list[str]] = []
    kv_lora_rank: int
    scale: float

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
        options = dict(alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap)
        for name, value in options.items():
            if value:
                raise NotImplementedError(f"{name} is not supported in latent attention")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"latent attention of type {attn_type} is not supported, expected a decoder's")
        self.is_quantized = is_quantized_kv_cache(kv_cache_dtype)
        if self.is_quantized and kv_cache_dtype not in self.quantized_caches:
            raise NotImplementedError(f"a cache of {kv_cache_dtype} is not supported in latent attention")
        super().__init__(  # type: ignore[call-arg]
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

    def attend(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        cache: Tensor,
        batch: Fa3MLADecodeMetadata,
        with_lse: bool,
        cache_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Causal attention of packed rows.

        Arguments:
            q: latent columns (tokens, heads, kv_lora_rank) and rotated columns (tokens, heads, qk_rope_head_dim), or
                one tensor with both.
            cache: (pages, page_rows, kv_lora_rank + qk_rope_head_dim), in q's dtype, or float8_e4m3fn.
            cache_scale: the factor on codes of float8_e4m3fn, float32 (); 1 if None.

        Returns: O (tokens, heads, kv_lora_rank) and, if wanted, LSE (tokens, heads), the natural logarithm.
        """
        q_latent, q_rotated = q if isinstance(q, tuple) else q.tensor_split((self.kv_lora_rank,), dim=-1)
        values, keys = cache.unsqueeze(2).tensor_split((self.kv_lora_rank,), dim=-1)
        is_rotated = q_rotated.shape[-1] > 0
        scale_of_heads = None if cache_scale is None else cache_scale.expand(len(batch.seq_lens), 1)
        result = flash_attn_varlen_func(
            q_rotated if is_rotated else None,
            keys if is_rotated else None,
            values,
            batch.query_start_loc,
            None,
            # A graph may be captured with a batch that has no rows.
            max(batch.max_query_len, 1),
            batch.max_seq_len,
            seqused_k=batch.seq_lens,
            page_table=batch.block_table,
            qv=q_latent,
            k_descale=scale_of_heads,
            v_descale=scale_of_heads,
            # 0 lets kernels split the keys of a sequence over CTAs; the function's default does not.
            num_splits=0,
            split_keys="fixed" if envs.VLLM_BATCH_INVARIANT else None,
            softmax_scale=self.scale,
            causal=True,
            return_attn_probs=with_lse,
        )
        return (result, None) if isinstance(result, Tensor) else (result[0], result[1].T)


class Fa3MLAImpl(Fa3MLALayer, MLACommonImpl[Fa3MLAMetadata]):
    """The latent attention of a layer. vLLM's base class computes prompts by an `MLAPrefillBackend`."""

    quantized_caches: ClassVar[list[str]] = _E4M3
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Fa3MLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """O (tokens, heads, kv_lora_rank) of the sequences that decode, and LSE (tokens, heads) where vLLM needs it.
        With decode context parallelism they are attention to this rank's keys.
        """
        decode = attn_metadata.decode
        assert decode is not None
        if decode.dcp_tot_seq_lens is not None and decode.max_query_len > 1:
            found = f"{decode.max_query_len} new rows of a sequence"
            raise NotImplementedError(f"{found} are not supported with decode context parallelism, expected one")
        cache, cache_scale = kv_c_and_k_pe_cache, None
        if self.is_quantized:
            cache, cache_scale = cache.view(torch.float8_e4m3fn), layer._k_scale
        return self.attend(q, cache, decode, self.need_to_return_lse_for_decode, cache_scale)


class Fa3MLAPrefill(MLAPrefillBackend):
    """The attention of prompts in models with latent attention, computed from the keys and values of all heads."""

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
        """Computes causal attention among the new tokens: O (tokens, heads, v_head_dim), and LSE (heads, tokens)."""
        if output_scale is not None:
            raise NotImplementedError("quantization of O in the kernel is not supported")
        batch = self._prefill_metadata
        ends, longest = batch.query_start_loc, batch.max_query_len
        options: dict[str, Any] = dict(causal=True, return_attn_probs=return_softmax_lse, out=out)
        return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, softmax_scale=self.scale, **options)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes O and LSE of the new tokens over a part of the earlier tokens, which all of them see."""
        lists = chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        result = flash_attn_varlen_func(q, k, v, *lists, softmax_scale=self.scale, return_attn_probs=True, out=out)
        assert isinstance(result, tuple)
        return result
