"""Reports on a corpus: its examples, their lengths, repeated texts, and the records that were left out.

`survey` computes, `text` prints for a terminal, `page` makes one self-contained HTML page.
"""
