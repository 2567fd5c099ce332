"""torch.distributed: groups by name, shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8graph.compat import distributed

needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def test_a_plain_tensor_is_its_own_shard() -> None:
    x = torch.ones(2)
    assert distributed.local(x) is x
    assert distributed.number_of_ranks(None) == 1


@needs_distributed
@pytest.mark.usefixtures("group_of_two")
def test_groups_by_name_and_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    group = mesh.get_group()
    assert distributed.process_group(group) is group
    assert distributed.process_group(group.group_name) is group
    assert distributed.number_of_ranks(group.group_name) == distributed.number_of_ranks(None) == 2
    sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    assert distributed.local(sharded).shape == (2, 4)
    assert isinstance(distributed.default_store(), dist.Store)
