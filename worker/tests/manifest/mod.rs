//! A coordinator's part where workers have the model: it sends the manifest.

use galaxy_model::{
    ModelDir,
    manifest::{Digest, Manifest},
};
use galaxy_proto::v1::{self, supplied::Event, worker_client::WorkerClient};
use std::{fs, ops::ControlFlow, path::Path};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// Calls a worker that wants the model in `path`, and gives it the manifest.
pub async fn say(mut client: WorkerClient<Channel>, path: &Path) {
    let model = ModelDir::open(path).unwrap();
    let config = fs::read(path.join("config.json")).unwrap();
    let go_on = &mut |_, _| ControlFlow::Continue(());
    let manifest = Manifest::of(&model, config, go_on).unwrap().unwrap().to_bytes().unwrap();
    let (supplied, stream) = mpsc::channel(4);
    let send = async |event| drop(supplied.send(v1::Supplied { event: Some(event) }).await);
    send(Event::Offer(v1::Offer {
        content: Digest::of(&manifest).0.to_vec(),
        manifest_bytes: manifest.len() as u64,
        fingerprint: model.fingerprint().to_owned(),
    }))
    .await;
    // A worker that has ended wants nothing.
    let Ok(wants) = client.supply(ReceiverStream::new(stream)).await else { return };
    let mut wants = wants.into_inner();
    while let Ok(Some(wanted)) = wants.message().await {
        assert!(wanted.pieces.is_empty(), "it has the model");
        if wanted.manifest {
            send(Event::Manifest(manifest.clone())).await;
        }
    }
}
