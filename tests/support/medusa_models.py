"""Medusa heads for the random target of the engine tests, fitted to what it says in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads, save_medusa


def write_medusa(
    folder: Path,
    target: str,
    *,
    heads: int = 3,
    layers: int = 1,
    shared: bool = False,
    accuracy: tuple[tuple[float, ...], ...] = (),
    steps: int = 60,
) -> str:
    """Heads that are right now and then on sampled text of ``target``; returns their folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="sdpa").eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prompts = torch.randint(10, 90, (24, 2))
        text = model.generate(
            prompts, max_new_tokens=60, do_sample=True, temperature=0.5, eos_token_id=None
        )
        with torch.no_grad():
            hidden = model.model(text).last_hidden_state
        config = MedusaConfig(
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            heads=heads,
            layers=layers,
            shared_head=shared,
            base_model="random",
            accuracy=accuracy,
        )
        module = MedusaHeads(config)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        for _ in range(steps):
            logits = module(hidden, model.lm_head)  # row t of head k predicts token t + 2 + k
            losses = [
                F.cross_entropy(own[:, : -2 - k].flatten(0, 1), text[:, 2 + k :].flatten())
                for k, own in enumerate(logits)
            ]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
    save_medusa(module, folder, target_layers=model.config.num_hidden_layers)
    return str(folder)
