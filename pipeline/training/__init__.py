"""Trains encoders and rankers.

A recipe makes a `Task` of the settings: the network, its batches, the loss, the validation. `launch` runs it
on the workers of Ray Train or in this process, and `loop` does its steps, and knows no model.

settings           what can be set, without torch
finetuning         the recipe of a ranker: `data` makes its batches, `objectives` their loss
negatives, guide   hard negatives that the model finds, and those that are probably right
teaching           scores and vectors of other rankers, added to a corpus
pretraining        the recipe of an encoder: `pretraining_data` makes its batches
tokenizer          learnt from corpora, which `tokenized_corpus` stores as ids
loop, checkpoint   the steps, and what a resumed run needs
launch             the workers, restarts after their deaths, and `termination` before
interface          the network over which workers on CPUs talk
estimate           --dry-run
"""
