"""What several tests share: data, workers, servers, and programs to run."""
