"""Memory in huge pages, and small pieces of one mapping."""

import itertools

import torch

from engine.kernels.memory import Arena, zeros


def test_pieces_are_zeros_of_their_own_on_cache_lines() -> None:
    arena = Arena()
    pieces = [arena.zeros(nbytes) for nbytes in (1, 64, 65, 0, 1000)]
    assert [len(piece) for piece in pieces] == [1, 64, 65, 0, 1000]
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces if len(piece))
    for number, piece in enumerate(pieces):
        assert not piece.any()
        piece.fill_(number + 1)
    assert all((piece == number + 1).all() for number, piece in enumerate(pieces))


def test_a_piece_that_no_longer_fits_starts_a_mapping() -> None:
    arena = Arena()
    pieces = [arena.zeros(15 << 20) for _ in range(5)]  # of 64 MiB, none of them touched
    starts = sorted(piece.data_ptr() for piece in pieces)
    assert all(b - a >= 15 << 20 for a, b in itertools.pairwise(starts))


def test_zeros_have_shape_and_dtype() -> None:
    empty, matrix = zeros((0, 3), torch.float32), zeros((2, 3), torch.bfloat16)
    assert empty.shape == (0, 3)
    assert matrix.dtype == torch.bfloat16
    assert not matrix.any()
