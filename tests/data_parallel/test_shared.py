"""A parameter of two wrappers: averaged where each copies the mean out, refused where it would be divided twice."""

from __future__ import annotations

import pytest
import torch
from data_parallel.pairs import assert_equal, inputs, wrapped
from torch import nn

from mpdist import Communicator, UsageError

pytestmark = pytest.mark.ranks(1, 2)


def test_a_parameter_of_two_wrappers_in_one_backward_is_named(comm: Communicator) -> None:
    shared = nn.Linear(6, 6).double()
    with wrapped(nn.Sequential(shared), comm) as first, wrapped(nn.Sequential(nn.Tanh(), shared), comm) as second:
        with pytest.raises(UsageError, match=r"0\.weight is a parameter of another one, too.*gradient_as_bucket_view"):
            second(first(inputs(comm, 0, (4, 6), torch.float64))).sum().backward()
        for model in (first, second):  # one after the other they may
            model(inputs(comm, 1, (4, 6), torch.float64)).sum().backward()


def test_it_is_averaged_where_both_wrappers_copy_the_mean_out(comm: Communicator) -> None:
    torch.manual_seed(1)
    shared = nn.Linear(6, 6).double()
    alone = nn.Linear(6, 6).double()
    alone.load_state_dict(shared.state_dict())
    options = {"gradient_as_bucket_view": False}
    with (
        wrapped(nn.Sequential(shared), comm, **options) as first,
        wrapped(nn.Sequential(nn.Tanh(), shared), comm, **options) as second,
    ):
        alone.load_state_dict(shared.state_dict())
        for number in range(4):
            x = inputs(comm, number, (4, 6), torch.float64)
            for layer in (shared, alone):
                layer.zero_grad()
            second(first(x)).sum().backward()
            alone(alone(x).tanh()).sum().backward()
            for parameter in alone.parameters():
                comm.all_reduce(parameter.grad, op="avg").wait()
            assert_equal([p.grad for p in shared.parameters()], [p.grad for p in alone.parameters()])


def test_wrappers_without_a_common_parameter_may_run_in_one_backward(comm: Communicator) -> None:
    with wrapped(nn.Linear(6, 6).double(), comm) as first, wrapped(nn.Linear(6, 6).double(), comm) as second:
        for number in range(3):
            second(first(inputs(comm, number, (4, 6), torch.float64))).sum().backward()
        assert first.reducer.step == second.reducer.step == 3
