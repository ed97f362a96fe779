"""Events to actions: how strangers' machines agree on one model. Digests, versions, weights; no tensors."""
