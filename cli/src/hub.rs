//! Repositories of models on a Hub, and downloads from them. For `galaxy pull` and the fuzz targets: no
//! part of the interface.
//!
//! Everything that a Hub says is untrusted. What becomes a path here is a name of a closed alphabet
//! ([`galaxy_model::files::is_plain`]) or a digest that we computed; addresses are parsed before they are
//! followed; lengths are bounded. See `docs/adr/0030-hub-downloads.md`.

pub mod address;
pub mod answer;
mod error;
mod partial_file;
mod repository;
mod web;

pub use answer::About;
pub use error::{HubError, TlsFault};
pub use repository::{Repository, Watch};
pub use web::{Patience, Web};
