"""The tokenizer belongs to the run: what a checkpoint was trained with decodes it, whatever became of the data."""

import io
import shutil

import pytest
from tiny import TINY

from mod_jax import sampling
from mod_jax.config import make_config
from mod_jax.data import tokenizers
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import CheckpointMismatch, ResumeRefused, StorageError
from mod_jax.evaluation.finished import evaluate_run
from mod_jax.training import loop
from mod_jax.training.checkpoint import Checkpointer

TEXT = "the cat sat on the mat; "


def write_texts(folder, words):
    folder.mkdir(exist_ok=True)
    for i in range(20):
        (folder / f"{i}.txt").write_text((words * 20) + str(i))


def train_sentencepiece(path):
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def trained(request, tmp_path_factory):
    """A finished run, its folder, and the config that continues it. Read it; write only into a copy."""
    home = tmp_path_factory.mktemp(request.param)
    write_texts(home / "texts", TEXT)
    spec = request.param
    if spec == "bpe":
        pytest.importorskip("tokenizers")
        spec = "bpe:300"
    if spec == "sentencepiece":
        train_sentencepiece(home / "cat.model")
        spec = f"sentencepiece:{home / 'cat.model'}"
    config = make_run_config(home, spec)
    loop.train(config, home / "run")
    return home, config


def make_run_config(home, spec, **changes):
    one_block = {"model.depth": 1, "model.layout": "F", "train.steps": 2, "train.save_every": 1}
    data = {"data.source": f"text:{home / 'texts'}", "data.cache_dir": str(home / "cache"), "data.tokenizer": spec}
    return make_config(**{**TINY, **one_block, **data, **changes})


@pytest.fixture
def moved(trained, tmp_path):
    """The workdir on another machine: neither corpus nor cache nor the tokenizer's own file is there."""
    home, _ = trained
    shutil.copytree(home / "run", tmp_path / "run")
    hidden = home.rename(home.with_name(f"{home.name}-away"))
    yield tmp_path / "run"
    hidden.rename(home)


@pytest.fixture
def copied(trained, tmp_path):
    """Everything copied, at its own paths, so that a test may edit it; put back afterwards."""
    home, config = trained
    shutil.copytree(home, tmp_path / "kept", symlinks=True)
    yield home, config
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "kept", home, symlinks=True)


def test_a_moved_run_samples_without_any_data(moved):
    model = sampling.restore(moved)
    assert model.tokenizer.decode(model.tokenizer.encode(TEXT)).strip() == TEXT.strip().encode()
    assert sampling.Sampler(model).generate(["the"], max_new_tokens=2)[0].tokens


def test_an_edited_corpus_changes_nothing_that_was_trained(copied, capsys):
    home, config = copied
    before = sampling.restore(home / "run").tokenizer
    write_texts(home / "texts", "quite other words, zebra! ")
    if config.data.tokenizer.startswith("sentencepiece"):
        (home / "cat.model").write_bytes(b"no model any more")
    model = sampling.restore(home / "run")
    assert (model.step, model.tokenizer.digest) == (2, before.digest)

    _, lines = evaluate_run(home / "run")
    assert sum(line.startswith("WARNING: trained on another corpus") for line in lines) == 1
    corpus = prepare_corpus(config.data, model.tokenizer)
    assert corpus.tokenizer.digest == before.digest
    assert corpus.digest != model.metadata["corpus_digest"]
    (home / "run" / "result.json").unlink()  # a finished run prints its result, whatever became of its data
    with pytest.raises(ResumeRefused, match="corpus digest"):
        loop.train(config, home / "run")


def test_a_damaged_or_exchanged_tokenizer_is_refused(copied, tmp_path):
    home, config = copied
    folder = home / "run" / "tokenizer"
    own = tokenizers.load(folder)
    tokenizers.save(tokenizers.make("bpe:270", [b"other text"]), folder)
    with pytest.raises(CheckpointMismatch, match=r"holds bpe:270 of digest .*, but the checkpoint was trained"):
        sampling.restore(home / "run")
    next(folder.glob("*.model")).write_bytes(b"damaged")
    with pytest.raises(StorageError, match="the tokenizer kept here cannot be used"):
        sampling.restore(home / "run")
    shutil.rmtree(folder)
    assert sampling.restore(home / "run").tokenizer.digest == own.digest  # made again from the same corpus
    loop.train(config, home / "run")
    assert tokenizers.load(folder).digest == own.digest
    shutil.rmtree(folder)
    write_texts(home / "texts", "quite other words, zebra! ")
    with pytest.raises(StorageError, match=r"tokenizer is not there, and its corpus has changed since: digest"):
        sampling.restore(home / "run")
    shutil.rmtree(home / "texts")
    with pytest.raises(StorageError, match=r"the run's tokenizer is not there, and its corpus cannot be prepared"):
        sampling.restore(home / "run")


def test_the_tokenizer_is_kept_before_the_first_checkpoint(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    config = make_run_config(tmp_path, "bpe:300")

    def crash(*args):
        raise RuntimeError("pulled plug")

    kept = []
    monkeypatch.setattr(Checkpointer, "save", crash)
    for words in (TEXT, "quite other words, zebra! "):  # nothing was saved yet, so the second is another run
        write_texts(tmp_path / "texts", words)
        with pytest.raises(RuntimeError, match="pulled plug"):
            loop.train(config, tmp_path / "run")
        kept.append(tokenizers.load(tmp_path / "run" / "tokenizer"))
        assert kept[-1].digest == prepare_corpus(config.data).tokenizer.digest
    assert kept[0].digest != kept[1].digest


def test_a_run_resumes_with_its_own_tokenizer_after_the_cache_is_gone(copied, monkeypatch):
    home, config = copied
    own = tokenizers.load(home / "run" / "tokenizer")
    shutil.rmtree(home / "cache")
    monkeypatch.setattr(tokenizers, "make", None)  # a newer library may train another one
    longer = make_run_config(home, config.data.tokenizer, **{"train.steps": 3})
    loop.train(longer, home / "run", extend=True)
    assert tokenizers.load(home / "run" / "tokenizer").digest == own.digest
    assert prepare_corpus(config.data, own).tokenizer.digest == own.digest
    assert len(list((home / "cache").iterdir())) == 1  # prepared once
