"""The running of jobs: in processes of this machine, or on an executor of others."""
