"""References to process groups from autograd's graphs, which may outlive a group."""

import weakref

import torch.distributed as dist


class Group:
    """A reference that does not keep its group. A group's threads end with its last owner: if a graph owned it,
    `destroy_process_group` would leave them running, and Python would abort if one needed it while it shuts down.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            RuntimeError: the group has been destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this call was destroyed, expected it to outlive its gradients")
        return group
