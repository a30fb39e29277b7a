"""The logits of models in Hugging Face's form, by NumPy: what `transformers` computes, in float64.

Written from the models' papers; `test_transformers.py` compares it with `transformers` itself.
"""

import json
import math

import numpy as np
from safetensors.numpy import load_file


def read(folder):
    """The settings and the arrays of a folder."""
    arrays = {}
    for file in sorted(folder.glob("*.safetensors")):
        arrays |= load_file(file)
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    return json.loads((folder / "config.json").read_text()), arrays


def logits(folder, tokens):
    """The logits, float64 [batch, length, vocabulary], of tokens [batch, length]."""
    config, arrays = read(folder)
    model = {"gpt2": gpt2, "bert": bert}.get(config["model_type"], llama)
    return model(config, arrays, tokens)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(query, key, value, window=None):
    """Causal attention of [batch, heads, length, size]."""
    length = query.shape[2]
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    ahead = np.arange(length)[None] - np.arange(length)[:, None]
    hidden = (ahead > 0) | (ahead <= -(window or length))
    return softmax(np.where(hidden, -np.inf, scores)) @ value


def layer_norm(x, arrays, name, epsilon):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def rope_angles(config, size, length):
    rope = config["rope_parameters"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        for i, f in enumerate(frequencies):
            turns = rope["original_max_position_embeddings"] / (2 * np.pi / f)
            if turns < low:
                frequencies[i] = f / rope["factor"]
            elif turns < high:
                smooth = (turns - low) / (high - low)
                frequencies[i] = (1 - smooth) * f / rope["factor"] + smooth * f
    return np.arange(length)[:, None] * frequencies


def llama(config, arrays, tokens):
    kind, size = config["model_type"], config["head_dim"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    plus = 1.0 if kind == "gemma" else 0.0
    batch, length = tokens.shape
    angles = rope_angles(config, size, length)

    def norm(x, name):
        rms = np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / rms * (arrays[f"{name}.weight"] + plus)

    def turned(x):
        first, second = np.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def projected(x, name, count):
        y = x @ arrays[f"{name}_proj.weight"].T + arrays.get(f"{name}_proj.bias", 0.0)
        return y.reshape(batch, length, count, size).transpose(0, 2, 1, 3)

    x = arrays["model.embed_tokens.weight"][tokens]
    x = x * config["hidden_size"] ** 0.5 if kind == "gemma" else x
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        counts = ("q", heads), ("k", shared), ("v", shared)
        q, k, v = (projected(y, f"{at}.self_attn.{name}", count) for name, count in counts)
        if kind in ("qwen3", "qwen3_moe"):
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        k, v = (part.repeat(heads // shared, 1) for part in (turned(k), v))
        window = config.get("sliding_window") if kind in ("mistral", "mixtral") else None
        mixed = attention(turned(q), k, v, window).transpose(0, 2, 1, 3)
        x = x + mixed.reshape(batch, length, -1) @ arrays[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        if f"{at}.mlp.up_proj.weight" in arrays:
            names = [f"{at}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
            x = x + gated(y, *(arrays[name].T for name in names), kind == "gemma")
        else:
            x = x + experts(config, arrays, at, y)
    head = arrays.get("lm_head.weight", arrays["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


def gated(x, gate, up, down, is_gelu=False):
    inner = x @ gate
    return ((gelu(inner) if is_gelu else inner / (1 + np.exp(-inner))) * (x @ up)) @ down


def experts(config, arrays, at, x):
    """Each token's best experts, one token after the other."""
    mixtral = config["model_type"] == "mixtral"
    at += ".block_sparse_moe" if mixtral else ".mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    routed = softmax(x @ arrays[f"{at}.gate.weight"].T)
    out = np.zeros_like(x)
    for where in np.ndindex(*x.shape[:-1]):
        best = np.argsort(-routed[where])[: config["num_experts_per_tok"]]
        for expert in best:
            kernels = (arrays[f"{at}.experts.{expert}.{name}.weight"].T for name in names)
            out[where] += (
                routed[where][expert] / routed[where][best].sum() * gated(x[where], *kernels)
            )
    return out


def bert(config, arrays, tokens):
    batch, length = tokens.shape
    heads = config["num_attention_heads"]
    erf = np.vectorize(math.erf)

    def exact_gelu(x):
        return 0.5 * x * (1 + erf(x / 2**0.5))

    def norm(x, name):
        return layer_norm(x, arrays, name, config["layer_norm_eps"])

    def dense(x, name):
        return x @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]

    at = "bert.embeddings"
    x = arrays[f"{at}.word_embeddings.weight"][tokens]
    x = x + arrays[f"{at}.position_embeddings.weight"][:length]
    x = norm(x + arrays[f"{at}.token_type_embeddings.weight"][0], f"{at}.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        at = f"bert.encoder.layer.{i}"
        q, k, v = (
            dense(x, f"{at}.attention.self.{name}")
            .reshape(batch, length, heads, -1)
            .transpose(0, 2, 1, 3)
            for name in ("query", "key", "value")
        )
        mixed = softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5) @ v
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = norm(
            x + dense(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
        )
        inner = exact_gelu(dense(x, f"{at}.intermediate.dense"))
        x = norm(x + dense(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    at = "cls.predictions"
    x = norm(exact_gelu(dense(x, f"{at}.transform.dense")), f"{at}.transform.LayerNorm")
    return x @ arrays["bert.embeddings.word_embeddings.weight"].T + arrays[f"{at}.bias"]


def gpt2(config, arrays, tokens):
    batch, length = tokens.shape
    hidden, heads = config["n_embd"], config["n_head"]

    def norm(x, name):
        return layer_norm(x, arrays, name, 1e-5)

    def dense(x, name):
        return x @ arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    x = arrays["transformer.wte.weight"][tokens] + arrays["transformer.wpe.weight"][:length]
    for i in range(config["n_layer"]):
        at = f"transformer.h.{i}"
        qkv = dense(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn")
        qkv = qkv.reshape(batch, length, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        mixed = attention(*qkv).transpose(0, 2, 1, 3).reshape(batch, length, hidden)
        x = x + dense(mixed, f"{at}.attn.c_proj")
        x = x + dense(gelu(dense(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")), f"{at}.mlp.c_proj")
    head = arrays.get("lm_head.weight", arrays["transformer.wte.weight"])
    return norm(x, "transformer.ln_f") @ head.T
