import numpy as np

from rftcli.engines.noise import RowNoise, uniforms


def test_the_same_numbers_on_every_machine_and_in_every_release():
    # pinned: a change here changes every run that is resumed
    numbers = [RowNoise(0, 7, 3).uniform(token) for token in (0, 1, 1000)]
    assert numbers == [0.2299466889619335, 0.7171153642494824, 0.09617967966901486]


def test_a_row_reads_its_own_stream_in_any_company():
    rows = [RowNoise(5, draw, sample) for draw in range(4) for sample in (-1, 0, 1)]
    keys = np.array([row.key for row in rows], dtype=np.uint64)
    tokens = np.arange(len(rows))
    together = uniforms(keys, tokens)
    assert [row.uniform(int(token)) for row, token in zip(rows, tokens, strict=True)] == together.tolist()
    assert uniforms(keys[::-1], tokens[::-1]).tolist() == together[::-1].tolist()


def test_every_part_of_the_key_counts():
    numbers = {RowNoise(seed, draw, sample).uniform(token) for seed in (0, 1) for draw in (0, 1) for sample in (0, 1) for token in (0, 1)}
    assert len(numbers) == 16


def test_uniform_and_uncorrelated_along_and_across_streams():
    keys = np.array([RowNoise(0, draw, 0).key for draw in range(100)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(100, token)) for token in range(1000)])  # (1000 tokens, 100 rows)
    assert table.min() >= 0.0 and table.max() < 1.0
    counts, _ = np.histogram(table, bins=100, range=(0, 1))
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 148.2  # the 99.9% point at 99 degrees of freedom
    centred = table - 0.5
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(product.mean())) < 4 / 12 / product.size**0.5
