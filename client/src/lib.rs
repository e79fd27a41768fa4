//! The Rust SDK: talks to a Galaxy coordinator and gets vectors, classes, generated text and tensors back.
//!
//! ```no_run
//! # async fn example() -> Result<(), galaxy_client::ClientError> {
//! use galaxy_client::Client;
//!
//! let client = Client::builder().address("192.168.1.10:7000").identity("keys/laptop").connect().await?;
//! let answer = client.embed(&["a lighthouse at night", "a beam over the sea"]).await?;
//! println!("{} values each; executed in {:?}", answer.vectors[0].len(), answer.report.execute);
//! # Ok(())
//! # }
//! ```
//!
//! Every call has a deadline, errors are typed ([`ClientError`]), and a call is tried again until that deadline where
//! the error says that a retry can help ([`RetryPolicy`]): it outlives devices that are lost, and a coordinator that is
//! started again. So does text that is being generated ([`Generating`]).

mod answer;
mod client;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod generate;
mod input;
mod members;
mod parts;
mod pieces;
mod retry;
mod status;
mod trace;

pub use answer::{
    Classes, DeviceReport, Embeddings, Output, Ranked, Ranking, Report, Tensor, Tensors,
};
pub use client::{Builder, Client, DEFAULT_TIMEOUT};
pub use error::ClientError;
pub use galaxy_common::{
    Fallback, GenerateOptions, GeneratedToken as Token, LinkRate, Prompt, RateError, Sampling,
    SamplingParams,
};
pub use generate::{Done, Generated, Generating};
pub use input::{EmbedOptions, Input, Prefix, TooLong};
pub use members::{Invitation, Member};
pub use parts::MAX_TEXTS_PER_PART;
pub use retry::RetryPolicy;
pub use status::{ClusterStatus, DeviceStatus, SequencesStatus};
pub use trace::{DeviceTrace, LaneTrace, Trace, hidden_communication};

/// The example of docs/api.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../../docs/api.md")]
struct ApiPage;
