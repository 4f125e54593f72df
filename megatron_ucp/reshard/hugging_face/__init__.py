"""A model under the names of Hugging Face: folders that go there and come from there, adapters."""
