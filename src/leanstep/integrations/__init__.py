"""leanstep where people already train: one file a host, each imported when it is used."""
