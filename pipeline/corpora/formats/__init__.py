"""One module for each public format, and what several of them share.

amazonqa, convai2, dstc7, intents, opensubtitles, pairs, starspace, ubuntu, wikipedia: a `prepare` each

tables           rows of Parquet, CSV and JSON, by `encodings`, `json_array` and `parquet_fetches`
articles         examples of articles
wikipedia_xml    Wikipedia's dumps, whose markup `wikitext` removes
wikipedia_extracted  WikiExtractor's output
"""
