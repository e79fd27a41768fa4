//! `--generation-config`: whose settings hold where a request leaves them open.

use clap::ValueEnum;
use galaxy_client::GenerateOptions;

/// Where settings come from that a request leaves open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum GenerationConfig {
    /// The model's generation_config.json.
    #[default]
    Auto,
    /// Nothing of that file holds but the tokens that end texts.
    None,
}

impl GenerationConfig {
    /// The options of a text whose request leaves things open.
    pub fn apply(self, options: GenerateOptions) -> GenerateOptions {
        match self {
            Self::Auto => options,
            Self::None => options.without_model_defaults(),
        }
    }
}
