"""The forward in torch: any model of transformers, prepacked and shortened where that gains."""
