//! What the `galaxy` command needs beside the SDK, for itself, its tests and its fuzz targets: the
//! download of models from the Hugging Face Hub ([`hub`]) and OpenAI's API ([`openai`]).

pub mod hub;
pub mod openai;
