"""What a step did: times, traces, digests."""
