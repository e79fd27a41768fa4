//! The fields of a tokenizer's files besides `tokenizer.json`, and how each is treated.

use crate::fields::{Table, Treatment};

/// The special tokens in `tokenizer_config.json` and in `special_tokens_map.json`.
pub(crate) const SPECIAL: Table = &[
    ("bos_token", Treatment::Read),
    ("eos_token", Treatment::Read),
    ("unk_token", Treatment::Read),
    ("sep_token", Treatment::Read),
    ("pad_token", Treatment::Read),
    ("cls_token", Treatment::Read),
    ("mask_token", Treatment::Read),
    ("additional_special_tokens", Treatment::Read),
    ("extra_special_tokens", Treatment::Read),
    ("image_token", Treatment::Read),
    ("video_token", Treatment::Read),
    ("audio_token", Treatment::Read),
];

/// The other fields of `tokenizer_config.json`.
pub(crate) const CONFIG: Table = &[
    ("tokenizer_class", Treatment::Read),
    ("model_max_length", Treatment::Read),
    ("max_len", Treatment::Read),
    ("truncation_side", Treatment::Read),
    ("model_input_names", Treatment::Read),
    ("do_lower_case", Treatment::Read),
    ("strip_accents", Treatment::Read),
    ("tokenize_chinese_chars", Treatment::Read),
    ("add_prefix_space", Treatment::Read),
    ("trim_offsets", Treatment::Read),
    ("legacy", Treatment::Read),
    ("added_tokens_decoder", Treatment::Read),
    ("split_special_tokens", Treatment::Read),
    ("clean_up_tokenization_spaces", Treatment::Read),
    ("chat_template", Treatment::Read),
    // transformers leaves these to tokenizer.json.
    ("add_bos_token", Treatment::Ignored),
    ("add_eos_token", Treatment::Ignored),
    // Nothing is padded here.
    ("padding_side", Treatment::Ignored),
    ("padding", Treatment::Ignored),
    ("pad_to_multiple_of", Treatment::Ignored),
    ("pad_token_type_id", Treatment::Ignored),
    ("max_length", Treatment::Ignored),
    ("stride", Treatment::Ignored),
    ("truncation", Treatment::Ignored),
    ("truncation_strategy", Treatment::Ignored),
    // For tokenizers that are built without tokenizer.json, or for saving one.
    ("backend", Treatment::Ignored),
    ("do_basic_tokenize", Treatment::Ignored),
    ("never_split", Treatment::Ignored),
    ("errors", Treatment::Ignored),
    ("from_slow", Treatment::Ignored),
    ("is_local", Treatment::Ignored),
    ("local_files_only", Treatment::Ignored),
    ("merges_file", Treatment::Ignored),
    ("name_or_path", Treatment::Ignored),
    ("processor_class", Treatment::Ignored),
    ("sp_model_kwargs", Treatment::Ignored),
    ("spaces_between_special_tokens", Treatment::Ignored),
    ("special_tokens_map_file", Treatment::Ignored),
    ("tokenizer_file", Treatment::Ignored),
    ("use_default_system_prompt", Treatment::Ignored),
    ("use_fast", Treatment::Ignored),
    ("verbose", Treatment::Ignored),
    ("vocab_file", Treatment::Ignored),
];
