"""The stages in data order: ingest, generate, vocab, (train), export, bench, report."""
