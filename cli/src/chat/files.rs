//! Opens the chat template and tokenizer of a chat, and what answers it.

use super::{ChatArgs, answer::Backend};
use crate::{
    connection::{Connection, reachable},
    decoder::Decoder,
    failure::Failure,
    in_process::model_failure,
    progress, tell,
};
use galaxy_cli::openai::chat::Chat;
use galaxy_coord::{Cluster, cluster::DEFAULT_FILE};
use galaxy_model::gguf_file;
use galaxy_proto::join::home;
use std::path::{Path, PathBuf};

/// Opens the chat template with its tokenizer, and the backend that answers.
pub async fn open(args: ChatArgs) -> Result<(Chat, Backend), Failure> {
    match args.model.clone() {
        Some(model) => here(args, model).await,
        None => on_cluster(args).await,
    }
}

/// Loads a model that answers in this process.
async fn here(args: ChatArgs, model: PathBuf) -> Result<(Chat, Backend), Failure> {
    let loading = tokio::task::spawn_blocking(move || {
        let chat = Chat::open(&model).map_err(model_failure)?;
        let decoder = Decoder::open(&model, &args.decoder)?;
        let context = decoder.context();
        Ok((chat, decoder.start(&args.decoder, context)?.into()))
    });
    let loaded = progress::watch("loading the model", loading).await;
    loaded.map_err(|e| Failure::new(format!("the model was not loaded: {e}")))?
}

/// Connects to a coordinator, and opens the chat template of its model.
async fn on_cluster(args: ChatArgs) -> Result<(Chat, Backend), Failure> {
    let Source { model, named, connection } = source(&args, home().as_deref())?;
    let client = connection.open().await?;
    let status = progress::watch("asking the coordinator", client.status()).await?;
    if let Some(warning) = other_model(&model, &status.model, "--template") {
        if !named {
            return Err(Failure::new(warning));
        }
        tell(&format!("warning: {warning}"));
    }
    let chat = Chat::open(&model).map_err(model_failure)?;
    let (client, model, context) = (Box::new(client), status.model, status.context);
    Ok((chat, Backend::Cluster { client, model, context }))
}

/// The model whose chat template is used, and the connection to the cluster that answers.
struct Source {
    model: PathBuf,
    /// Whether an argument named the model, or the cluster file that names it.
    named: bool,
    connection: Connection,
}

fn source(args: &ChatArgs, home: Option<&Path>) -> Result<Source, Failure> {
    let connection = args.connection.clone();
    if let Some(model) = args.template.clone() {
        let connection = match &args.cluster {
            Some(file) => connection.or_at(reachable(&read(file)?.listen)),
            None => connection,
        };
        return Ok(Source { model, named: true, connection });
    }
    if let Some(file) = &args.cluster {
        let Cluster { model, listen, .. } = read(file)?;
        let connection = connection.or_at(reachable(&listen));
        return Ok(Source { model, named: true, connection });
    }
    let of_home = home.map(|home| home.join("cluster").join(DEFAULT_FILE));
    let found = of_home.into_iter().chain([DEFAULT_FILE.into()]).find(|file| file.is_file());
    match found {
        Some(file) => Ok(Source { model: read(&file)?.model, named: false, connection }),
        None => {
            let what = "chats are written as the model's template says, and no cluster file of this machine names the \
                        model";
            let todo = "name the directory or the GGUF file of the cluster's model with --template, or run a model \
                        here with --model";
            Err(Failure::new(what).todo(todo))
        }
    }
}

fn read(file: &Path) -> Result<Cluster, Failure> {
    Cluster::open(file).map_err(|error| Failure::new(error.to_string()).at(file.display()))
}

/// The warning where chats are rendered for a model of another name than the served one; it may be the same model all
/// the same. `option` is the argument that corrects it.
pub fn other_model(path: &Path, served: &str, option: &str) -> Option<String> {
    let file = gguf_file(path).unwrap_or_else(|| path.to_owned());
    let differs = file.file_name().is_some_and(|name| *name != *served);
    differs.then(|| {
        format!(
            "the cluster serves {served}, and chats are written for {}; if these are not one model, name the \
             directory or the GGUF file of the cluster's with {option}",
            path.display()
        )
    })
}
