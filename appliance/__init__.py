"""The appliance: a supervisor that launches, guards, proxies and measures one vLLM engine."""
