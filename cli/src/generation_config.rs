//! `--generation-config`: whose settings hold where a request leaves them open.

use clap::ValueEnum;
use galaxy_client::GenerateOptions;

/// Where settings come from that a request leaves open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum GenerationConfig {
    /// The model's generation_config.json.
    #[default]
    Auto,
    /// Built-in defaults; of generation_config.json, only the tokens that end texts count.
    None,
}

impl GenerationConfig {
    /// Applies this choice to the options of a request.
    pub fn apply(self, options: GenerateOptions) -> GenerateOptions {
        match self {
            Self::Auto => options,
            Self::None => options.without_model_defaults(),
        }
    }
}
