"""Computes statistics of batches and evaluations and stage times, and writes the files of tokens and samples."""
