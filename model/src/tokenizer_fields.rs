//! The fields of the files of a tokenizer besides `tokenizer.json`.

use crate::fields::{Fate, Table};

/// Special tokens, in `tokenizer_config.json` and in `special_tokens_map.json`.
pub(crate) const SPECIAL: Table = &[
    ("bos_token", Fate::Read),
    ("eos_token", Fate::Read),
    ("unk_token", Fate::Read),
    ("sep_token", Fate::Read),
    ("pad_token", Fate::Read),
    ("cls_token", Fate::Read),
    ("mask_token", Fate::Read),
    ("additional_special_tokens", Fate::Read),
    ("extra_special_tokens", Fate::Read),
    ("image_token", Fate::Read),
    ("video_token", Fate::Read),
    ("audio_token", Fate::Read),
];

/// `tokenizer_config.json`.
pub(crate) const CONFIG: Table = &[
    ("tokenizer_class", Fate::Read),
    ("model_max_length", Fate::Read),
    ("max_len", Fate::Read),
    ("truncation_side", Fate::Read),
    ("model_input_names", Fate::Read),
    ("do_lower_case", Fate::Read),
    ("strip_accents", Fate::Read),
    ("tokenize_chinese_chars", Fate::Read),
    ("add_prefix_space", Fate::Read),
    ("trim_offsets", Fate::Read),
    ("legacy", Fate::Read),
    ("added_tokens_decoder", Fate::Read),
    ("split_special_tokens", Fate::Read),
    ("clean_up_tokenization_spaces", Fate::Read),
    ("chat_template", Fate::Read),
    // transformers leaves these to tokenizer.json.
    ("add_bos_token", Fate::Needless),
    ("add_eos_token", Fate::Needless),
    // Nothing is padded here.
    ("padding_side", Fate::Needless),
    ("padding", Fate::Needless),
    ("pad_to_multiple_of", Fate::Needless),
    ("pad_token_type_id", Fate::Needless),
    ("max_length", Fate::Needless),
    ("stride", Fate::Needless),
    ("truncation", Fate::Needless),
    ("truncation_strategy", Fate::Needless),
    // Of tokenizers that are not made of tokenizer.json, or of saving one.
    ("backend", Fate::Needless),
    ("do_basic_tokenize", Fate::Needless),
    ("never_split", Fate::Needless),
    ("errors", Fate::Needless),
    ("from_slow", Fate::Needless),
    ("is_local", Fate::Needless),
    ("local_files_only", Fate::Needless),
    ("merges_file", Fate::Needless),
    ("name_or_path", Fate::Needless),
    ("processor_class", Fate::Needless),
    ("sp_model_kwargs", Fate::Needless),
    ("spaces_between_special_tokens", Fate::Needless),
    ("special_tokens_map_file", Fate::Needless),
    ("tokenizer_file", Fate::Needless),
    ("use_default_system_prompt", Fate::Needless),
    ("use_fast", Fate::Needless),
    ("verbose", Fate::Needless),
    ("vocab_file", Fate::Needless),
];
