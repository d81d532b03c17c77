"""Batches are a pure function of seed and step; held-out windows are spread fairly."""

import math
import pickle

import numpy as np
import pytest
from texts import assert_equal_batches, ids_of, make_corpus, take

from mod_jax.config import DataConfig
from mod_jax.data.batches import _Windows, bits_per_byte, eval_batches, eval_window_starts, train_batches
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import DataError


@pytest.fixture
def ten_chunks(tmp_path):
    # separator + 80 bytes = 81 tokens: (81 - 1) / 8 = 10 chunks of 8
    return make_corpus(tmp_path, train=[bytes(range(32, 112))])


def test_a_token_id_outside_the_vocabulary_never_reaches_a_batch(tmp_path):
    corpus = make_corpus(tmp_path, train=[b"train" * 3], validation=[b"validation" * 3])
    for split in ("train", "validation"):
        tokens = np.load(corpus.directory / f"{split}.npy")
        tokens[7] = 999
        np.save(corpus.directory / f"{split}.npy", tokens)
    with pytest.raises(DataError, match=r"text:.*, split train: token id 999 is outside the vocabulary \[0, 257\)"):
        take(train_batches(corpus, seq_len=4, batch_size=4, seed=0), 1)
    with pytest.raises(DataError, match="split validation: token id 999"):
        eval_batches(corpus, seq_len=4, num_windows=9, batch_size=4)


# Stage 2: training


def test_a_row_by_hand(tmp_path):
    # Stream: 0 a b | 0 c d e | 0 f  ->  9 tokens, one chunk of 8 with its 8 next tokens.
    corpus = make_corpus(tmp_path, train=[b"ab", b"cde", b"f"])
    [batch] = take(train_batches(corpus, seq_len=8, batch_size=2, seed=0), 1)
    a, b, c, d, e, f = range(98, 104)
    expected = dict(
        tokens_BT=[0, a, b, 0, c, d, e, 0],
        targets_BT=[a, b, 0, c, d, e, 0, f],
        positions_BT=[0, 1, 2, 0, 1, 2, 3, 0],
        segment_ids_BT=[1, 1, 1, 2, 2, 2, 2, 3],
    )
    for key, row in expected.items():
        assert batch[key].tolist() == [row, row]  # batch 2 of 1 chunk: repeated
        assert batch[key].dtype == np.int32
        assert batch[key].flags.c_contiguous
    assert batch["example_ids_B"].tolist() == [0, 0]
    assert batch["example_ids_B"].dtype == np.int64


def test_a_row_that_starts_inside_a_document(tmp_path):
    # Stream: 0 a b c d | 0 e f g; chunk 1 of 4 tokens is d | 0 e f with targets | 0 e f g.
    corpus = make_corpus(tmp_path, train=[b"abcd", b"efg"])
    batch = take(train_batches(corpus, seq_len=4, batch_size=2, seed=0), 1)[0]
    row = batch["example_ids_B"].tolist().index(1)
    assert batch["tokens_BT"][row].tolist() == [101, 0, 102, 103]
    assert batch["targets_BT"][row].tolist() == [0, 102, 103, 104]
    assert batch["positions_BT"][row].tolist() == [0, 0, 1, 2]
    assert batch["segment_ids_BT"][row].tolist() == [1, 2, 2, 2]


def test_every_epoch_visits_every_chunk_once_in_a_new_order(ten_chunks):
    ids = np.concatenate(ids_of(take(train_batches(ten_chunks, seq_len=8, batch_size=4, seed=0), 15)))
    epochs = ids.reshape(6, 10)  # 15 steps of 4
    assert (np.sort(epochs) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_the_seed_decides_the_order(ten_chunks):
    streams = [take(train_batches(ten_chunks, seq_len=8, batch_size=4, seed=s), 5) for s in (0, 0, 1)]
    assert_equal_batches(streams[0], streams[1])
    assert ids_of(streams[0]) != ids_of(streams[2])


def test_three_resumes_give_the_uninterrupted_stream(ten_chunks):
    # 10 chunks, batch 4: the first epoch ends in the middle of step 2, the second with step 4.
    whole = take(train_batches(ten_chunks, seq_len=8, batch_size=4, seed=3), 12)
    pieces = []
    for start, stop in ((0, 2), (2, 3), (3, 5), (5, 12)):
        stream = train_batches(ten_chunks, seq_len=8, batch_size=4, seed=3, start_step=start)
        pieces += take(stream, stop - start)
    assert_equal_batches(pieces, whole)
    late = take(train_batches(ten_chunks, seq_len=8, batch_size=4, seed=3, start_step=10**6), 1)
    assert late[0]["tokens_BT"].shape == (4, 8)  # far on, at once


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_worker_processes_do_not_change_the_stream(ten_chunks, workers):
    options = dict(seq_len=8, batch_size=4, seed=3)
    whole = take(train_batches(ten_chunks, **options), 7)
    first = take(train_batches(ten_chunks, **options, workers=workers), 3)
    rest = take(train_batches(ten_chunks, **options, start_step=3, workers=workers), 4)
    assert_equal_batches(first + rest, whole)


def test_a_worker_is_sent_a_path_not_the_tokens(tmp_path):

    corpus = make_corpus(tmp_path, train=[b"t" * 100_000])
    sent = pickle.dumps(_Windows(corpus, "train", corpus.train_parts[0], 8))
    assert len(sent) < 1000
    batch = pickle.loads(sent).cut(np.array([2]), np.array([16]))
    assert batch["tokens_BT"].tolist() == [[117] * 8]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_read_disjoint_rows_of_one_stream(ten_chunks, processes):
    options = dict(seq_len=8, batch_size=8, seed=1)
    whole = take(train_batches(ten_chunks, **options), 6)
    share = 8 // processes
    parts = [
        take(train_batches(ten_chunks, **options, rows=slice(p * share, (p + 1) * share)), 6) for p in range(processes)
    ]
    joined = [
        {key: np.concatenate([part[step][key] for part in parts]) for key in whole[0]} for step in range(len(whole))
    ]
    assert {len(part[0]["tokens_BT"]) for part in parts} == {share}
    assert_equal_batches(joined, whole)


def test_too_little_text_for_one_row_is_refused(tmp_path):
    corpus = make_corpus(tmp_path, train=[b"1234567"], validation=[b"1234567"])  # 8 tokens with the separator
    assert take(train_batches(corpus, seq_len=7, batch_size=3, seed=0), 2)
    assert len(eval_batches(corpus, seq_len=7, num_windows=5, batch_size=2)) == 1
    with pytest.raises(DataError, match=r"8 train tokens; one row needs data.seq_len \+ 1 = 9"):
        train_batches(corpus, seq_len=8, batch_size=1, seed=0)
    with pytest.raises(DataError, match=r"8 validation tokens; one window needs data.seq_len \+ 1 = 9"):
        eval_batches(corpus, seq_len=8, num_windows=5, batch_size=2)


# Stage 2: held-out windows


def windows_of(tmp_path, lengths, seq_len, num_windows):
    """Window starts and documents for validation documents of these lengths in tokens, separator included."""
    corpus = make_corpus(tmp_path, validation=[b"x" * (length - 1) for length in lengths])
    starts, documents = eval_window_starts(corpus, seq_len, num_windows)
    ends = np.append(corpus.validation_starts[1:], corpus.validation_tokens.size)
    return starts, documents, corpus.validation_starts, ends


def assert_inside_and_apart(starts, documents, document_starts, ends, seq_len):
    assert (starts >= document_starts[documents]).all()
    assert (starts + seq_len < ends[documents]).all()  # with the last target
    assert (np.diff(starts) >= seq_len).all()


def test_windows_are_spaced_evenly_inside_a_document(tmp_path):
    # 10 documents of 21 tokens, 20 windows of 4: two each. Half a document is 10 tokens, its middle 5 and 15, and the
    # window starts 2 before it: at 3 and 13 of each document.
    starts, documents, *_ = windows_of(tmp_path, [21] * 10, seq_len=4, num_windows=20)
    assert starts.tolist() == [21 * d + offset for d in range(10) for offset in (3, 13)]
    assert documents.tolist() == [d for d in range(10) for _ in range(2)]


def test_one_large_document_cannot_decide_the_metric(tmp_path):
    # Room for windows of 4: (401 - 1) / 4 = 100 in document 0, (5 - 1) / 4 = 1 in each of the other 11.
    # A second one from document 0 would be 2 of 13 windows, more than a tenth.
    starts, documents, *bounds = windows_of(tmp_path / "a", [401] + [5] * 11, seq_len=4, num_windows=100)
    assert np.bincount(documents).tolist() == [1] * 12
    assert_inside_and_apart(starts, documents, *bounds, seq_len=4)
    # With room for 2 in each of 20 others: 42 windows after two rounds, then 43 and 44 (4 of 44 < 1/10); not 5 of 45.
    starts, documents, *bounds = windows_of(tmp_path / "b", [9] * 10 + [401] + [9] * 10, seq_len=4, num_windows=100)
    assert np.bincount(documents).tolist() == [2] * 10 + [4] + [2] * 10
    assert_inside_and_apart(starts, documents, *bounds, seq_len=4)


def test_documents_shorter_than_a_window_give_none(tmp_path):
    # 5 tokens hold a window of 4 and its last target, 4 tokens do not
    starts, documents, *_ = windows_of(tmp_path, [4, 5] * 10, seq_len=4, num_windows=100)
    assert documents.tolist() == list(range(1, 20, 2))
    assert starts.tolist() == [9 * i + 4 for i in range(10)]


def test_fewer_windows_than_documents_are_spread_over_them(tmp_path):
    _, documents, *_ = windows_of(tmp_path, [21] * 12, seq_len=4, num_windows=4)
    assert documents.tolist() == [0, 3, 6, 9]
    # 45 windows from 12 documents: three each make 36, the other 9 go to documents floor(i * 12 / 9)
    _, documents, *_ = windows_of(tmp_path, [81] * 12, seq_len=4, num_windows=45)
    assert np.bincount(documents).tolist() == [4, 4, 4, 3] * 3
    # 25 windows: two each make 24, a third for one document would be 3 of 25, more than a tenth
    _, documents, *_ = windows_of(tmp_path, [81] * 12, seq_len=4, num_windows=25)
    assert np.bincount(documents).tolist() == [2] * 12


def test_few_documents_fall_back_to_the_packed_stream(tmp_path):
    # 2 documents of 10 tokens, one stream of 20. Two windows of 4: shares of 19 / 2 tokens, doubled middles 9 and 28,
    # starts (9 - 4) // 2 = 2 and (28 - 4) // 2 = 12; the second is in document 1.
    starts, documents, *_ = windows_of(tmp_path, [10, 10], seq_len=4, num_windows=2)
    assert (starts.tolist(), documents.tolist()) == ([2, 12], [0, 1])
    starts, documents, _, ends = windows_of(tmp_path, [10, 10], seq_len=4, num_windows=100)
    assert starts.size == 4  # (20 - 1) // 4
    assert starts[-1] + 4 < ends[-1]
    assert (np.diff(starts) >= 4).all()


def test_eval_batches_have_one_shape_and_padding_that_counts_for_nothing(tmp_path):
    corpus = make_corpus(tmp_path, validation=[bytes([i]) * 20 for i in range(10)])
    batches = eval_batches(corpus, seq_len=4, num_windows=10, batch_size=4)
    assert ids_of(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]
    for batch in batches:
        assert {key: array.shape for key, array in batch.items()} == dict.fromkeys(
            ("tokens_BT", "targets_BT", "positions_BT", "segment_ids_BT", "target_bytes_BT"), (4, 4)
        ) | {"example_ids_B": (4,)}
    last = batches[-1]
    assert last["tokens_BT"][:, 0].tolist() == [9, 10, 0, 0]  # byte 8 is token 9
    assert (last["segment_ids_BT"] > 0).all(axis=1).tolist() == [True, True, False, False]
    assert not last["targets_BT"][2:].any()
    assert not last["segment_ids_BT"][2:].any()
    assert last["target_bytes_BT"].tolist() == [[1] * 4] * 2 + [[0] * 4] * 2
    train = take(train_batches(make_corpus(tmp_path, train=[b"t" * 9]), seq_len=4, batch_size=4, seed=0), 1)[0]
    assert {key: (array.shape, array.dtype) for key, array in train.items()} == {
        key: (array.shape, array.dtype) for key, array in last.items() if key != "target_bytes_BT"
    }
    assert_equal_batches(batches, eval_batches(corpus, seq_len=4, num_windows=10, batch_size=4))


def test_the_default_corpus_gives_the_windows_asked_for(tmp_path):
    corpus = prepare_corpus(DataConfig(cache_dir=str(tmp_path)))
    starts, documents = eval_window_starts(corpus, seq_len=256, num_windows=128)
    assert starts.size == 128
    assert np.bincount(documents).max() <= 12  # a tenth
    assert np.unique(documents).size >= 20


def test_bits_per_byte():
    # 3 nats / ln 2 over 2 tokens of 2 bytes each: 3 ln 2 / ln 2 / 4 = 0.75
    assert bits_per_byte(3 * math.log(2), 4) == pytest.approx(0.75)
