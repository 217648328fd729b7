"""The keys of a drafter's config.json that its method's reader honours or refuses; all others are named when it loads.

What they mean is the readers' business (config_keys.py, block_config.py, gemma4_config.py, the leaves). Keys that mean
nothing for any result are in models/unknown_keys.py. Source: the published files.
"""

from __future__ import annotations

from outrider.models.unknown_keys import GEMMA, LAYERS, keys

# The Speculators format's frame, and what every trained drafter may say of its target.
_FRAME = keys("""
    speculators_config speculators_model_type transformer_layer_config draft_vocab_size target_hidden_size
    num_target_layers target_layer_ids eagle_aux_hidden_state_layer_ids logit_scale use_aux_hidden_state
    embed_requires_grad target_model_type
""")
# The experts of DeepSeek's configs are the target's: draft layers are dense.
EAGLE = (LAYERS | _FRAME) | keys("""
    eagle_config layer_ids norm_before_residual norm_before_fc fc_norm norm_output num_aux_hidden_states num_aux_layers
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim
    n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group topk_method norm_topk_prob scoring_func
    moe_intermediate_size moe_layer_freq first_k_dense_replace routed_scaling_factor aux_loss_alpha seq_aux ep_size
""")
BLOCK = (LAYERS | _FRAME) | keys("""
    dflash_config layer_ids aux_hidden_state_layer_ids mask_token_id dspark_noise_token_id pard_token ptd_token_id
    block_size dspark_block_size sample_from_anchor sliding_window_non_causal causal is_causal use_swa
    swa_window_size attention_value_scale is_neox_style attention_sink_bias add_swa_attention_sink_bias
    projector_type num_anchors
    markov_rank markov_head_type enable_confidence_head confidence_head_with_markov dspark_draft_topk
""")
GEMMA4_DRAFTER = GEMMA | keys("""
    backbone_hidden_size use_ordered_embeddings num_centroids centroid_intermediate_top_k target_kv_layers
    draft_vocab_size suppress_tokens
""")
MODULE = keys("draft_vocab_size")
"""Beside the keys of the target, whose config.json a module's is."""
