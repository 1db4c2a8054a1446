"""Russian, German and Chinese through a tiny XLM-RoBERTa: the vectors are those of `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.models import cpu, inference
from pipeline.models.encoder import Encoder, set_dropout
from pipeline.models.interop import sentence_transformers
from pipeline.models.interop.sentence_transformers import Lengths
from pipeline.models.tokens import Tokenizer
from tests.multilingual import LIMIT, PAIRS, PROMPTS, mean_vectors, outputs, save_encoder

pytestmark = pytest.mark.usefixtures("fp32")
QUESTIONS = [question for question, _ in PAIRS]
ANSWERS = list(dict.fromkeys(answer for _, answer in PAIRS))
LONG = {
    "German": " ".join(f"{question} {answer}" for question, answer in PAIRS[:24]),
    "Russian": " ".join(f"{question} {answer}" for question, answer in PAIRS[24:48]),
    "Chinese": "".join(question + answer for question, answer in PAIRS[48:]),
}


@pytest.fixture(scope="module", params=["XLMRobertaTokenizer", "PreTrainedTokenizerFast"])
def folder(request, tmp_path_factory):
    """With the tokenizer's class as published folders name it."""
    return save_encoder(tmp_path_factory.mktemp("xlm-roberta"), request.param)


@pytest.fixture(scope="module")
def ranker(folder):
    return sentence_transformers.load(folder, Lengths())


def test_vectors_are_those_of_transformers_behind_the_prompts(folder, ranker):
    contexts_BMD, _ = inference.context_vectors(ranker, [[question] for question in QUESTIONS])
    expected = mean_vectors(folder, [PROMPTS["query"] + question for question in QUESTIONS])
    torch.testing.assert_close(contexts_BMD[:, 0], expected, rtol=0, atol=1e-5)
    texts = [*ANSWERS, *LONG.values()]
    expected = mean_vectors(folder, [PROMPTS["passage"] + text for text in texts])
    found = inference.candidate_vectors(ranker, texts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert len(found.unique(dim=0)) == len(texts)


@pytest.mark.parametrize("language", LONG)
@pytest.mark.parametrize("repeats", [1, 40])  # of 40 no more is tokenised than is kept
def test_long_texts_keep_their_end_or_their_beginning(folder, ranker, language, repeats):
    """As tokens of the whole text, behind the prompt."""
    text = " ".join([LONG[language]] * repeats)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole, query, passage = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (text, PROMPTS["query"], PROMPTS["passage"])
    )
    assert len(whole) > 2 * LIMIT and tokenizer.unk_token_id not in whole[:LIMIT]
    (context,), (candidate,) = ranker.context_rows([[text]]), ranker.candidate_rows([text])
    assert context == [0, *query, *whole[len(query) + 2 - LIMIT :], 2]
    assert candidate == [0, *passage, *whole[: LIMIT - 2 - len(passage)], 2]


def test_a_packed_row_computes_what_transformers_does(folder):
    """Position ids begin behind the padding's id, 1, in every text of the row."""
    texts = [*QUESTIONS[::5], *ANSWERS[::3], LONG["Chinese"]]
    tokenizer, encoder = Tokenizer.load(folder), Encoder.load(folder).train()
    assert encoder.positions == LIMIT
    set_dropout(encoder, 0.0)
    encoder.packs = cpu.accelerate(encoder.hf)
    tokens = tokenizer.batch(tokenizer.candidates(texts, LIMIT))
    assert encoder._is_packed([tokens]) and max(tokens.lengths) == LIMIT
    hidden_BTD, mask_BT = outputs(folder, texts)
    assert torch.equal(tokens.mask_BT, mask_BT)
    with torch.no_grad():
        found_BTD = encoder(tokens)
    torch.testing.assert_close(found_BTD[mask_BT], hidden_BTD[mask_BT], rtol=0, atol=1e-4)


def test_pieces_read_as_the_text(ranker):
    for text in ANSWERS[::6]:
        (row,) = ranker.candidate_rows([text])
        assert "".join(ranker.tokenizer.pieces(row[1:-1])).strip() == PROMPTS["passage"] + text


def test_the_library_gives_the_same_vectors(folder, ranker):
    """An extra, so the tests do without it. Its `encode_document` takes a prompt called document alone."""
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    contexts_BMD, _ = inference.context_vectors(ranker, [[text] for text in QUESTIONS])
    found = torch.from_numpy(theirs.encode_query(QUESTIONS))
    torch.testing.assert_close(contexts_BMD[:, 0], found, rtol=0, atol=1e-5)
    found = torch.from_numpy(theirs.encode(ANSWERS, prompt_name="passage"))
    expected = inference.candidate_vectors(ranker, ANSWERS)
    torch.testing.assert_close(expected, found, rtol=0, atol=1e-5)
