"""The classes of an attention backend of vLLM 0.33 for sparse latent attention: each token attends to the rows of the
cache that an indexer chose for it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from .. import sparse_operator
from ..sparse_operator import Lists, Options
from .mla import Fa3MLABackend, Fa3MLALayer

__all__ = ["Fa3MLASparseBackend", "Fa3MLASparseImpl", "Fa3MLASparseMetadata", "Fa3MLASparseMetadataBuilder"]


class Fa3MLASparseBackend(AttentionBackend):
    """The capabilities of this package's sparse latent attention. vLLM refuses a model that needs anything else."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        # vLLM looks its backends up by this name. This class takes the place of vLLM's own class.
        return "FLASH_ATTN_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type["Fa3MLASparseImpl"]:
        return Fa3MLASparseImpl

    @staticmethod
    def get_builder_cls() -> type["Fa3MLASparseMetadataBuilder"]:
        return Fa3MLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Makes blocks lie whole rows apart, so that one list of row numbers can address all of them."""
        return align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return Fa3MLABackend.get_supported_head_sizes()

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability == DeviceCapability(9, 0)


@dataclass
class Fa3MLASparseMetadata(SparseMLACommonMetadata):
    """vLLM's metadata of a batch."""


class Fa3MLASparseMetadataBuilder(SparseMLACommonMetadataBuilder[Fa3MLASparseMetadata]):
    """Makes the metadata of a batch, by vLLM's base class."""

    metadata_cls = Fa3MLASparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # A sequence with up to this number of new rows is computed over the latent cache.
        self._init_reorder_batch_threshold(256, supports_spec_as_decode=True)


class Fa3MLASparseImpl(Fa3MLALayer, SparseMLACommonImpl[Fa3MLASparseMetadata]):
    """The sparse latent attention of a layer. vLLM's base class turns the indexer's choice into row numbers."""

    group_conversion_decode_only: ClassVar[bool] = True

    def _forward_mqa_kernel(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        topk_indices: Tensor,
        valid_counts: Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes O (tokens, heads, kv_lora_rank). topk_indices, int32 (tokens, topk), lists the rows of the cache
        that are each token's keys; the first valid_counts are used.
        """
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        q_latent, q_rotated = q if isinstance(q, tuple) else q.tensor_split((self.kv_lora_rank,), dim=-1)
        q_latent, q_rotated = q_latent.unsqueeze(1), q_rotated.unsqueeze(1)
        values, keys = rows[None, :, None].tensor_split((self.kv_lora_rank,), dim=-1)
        has_rotated = q_rotated.shape[-1] > 0
        tensors = (q_rotated, keys, values) if has_rotated else (q_latent, values, values)
        options = Options(self.scale, 0, -1, qv=q_latent if has_rotated else None)
        lists = Lists(topk_indices, valid_counts)
        o, _ = sparse_operator.attention(tensors, lists, options, with_lse=False)
        return o.squeeze(1), None
