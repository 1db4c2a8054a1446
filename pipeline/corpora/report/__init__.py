"""A look at a corpus: what is in it, how long, how often, and what was left out.

`survey` computes, `text` prints for a terminal, `page` makes one self-contained HTML page.
"""
