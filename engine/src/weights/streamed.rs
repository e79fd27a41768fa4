//! A shard whose matrices come from disk, piece by piece, besides those that stay.

use super::{
    AnyMatrix, HeldMatrix, Progress, Shard, WeightError,
    load::Loader,
    matrix::{Layout, NoRoom},
    phases_fit,
};
use crate::{
    compute::choice::EngineChoice,
    stream::{Ask, Ring, Stream, StreamError},
};
use galaxy_common::{Bytes, DeviceName, DevicePlan, Streaming, WeightFormat};
use galaxy_graph::{
    operators::{OperatorGraph, OperatorId},
    pieces::{self, Piece},
};
use galaxy_model::ModelDir;
use std::{collections::HashMap, ops::ControlFlow, path::Path, sync::Arc};

/// What a device has of its matrices.
#[derive(Debug)]
pub(crate) struct Streamed {
    pieces: Vec<HeldPiece>,
    /// By matrix, and the first column of the product.
    by_place: HashMap<(OperatorId, u32), usize>,
    format: WeightFormat,
    pub(crate) stream: Arc<Stream>,
}

/// A piece, whether it stays or not.
#[derive(Debug)]
struct HeldPiece {
    layout: Layout,
    /// Its values, if it stays.
    matrix: Option<HeldMatrix>,
    /// The bias of its columns.
    bias: Option<Vec<f32>>,
}

impl Streamed {
    /// The matrix of a product whose first column is `column`, with the bias of its columns. `read` are the
    /// bytes that the program has loaded for it. None where there is no such piece, or it is not loaded.
    pub(crate) fn matrix<'a>(
        &'a self,
        (operator, column): (OperatorId, u32),
        read: Option<&'a [u8]>,
    ) -> Option<(AnyMatrix<'a>, Option<&'a [f32]>)> {
        let piece = &self.pieces[*self.by_place.get(&(operator, column))?];
        let matrix = match &piece.matrix {
            Some(held) => held.into(),
            None => AnyMatrix::of_bytes(piece.layout, self.format, read?)?,
        };
        Some((matrix, piece.bias.as_deref()))
    }

    /// Bytes that stay, without the buffer.
    pub(crate) fn bytes(&self) -> u64 {
        let bias = |piece: &HeldPiece| piece.bias.as_ref().map_or(0, |bias| 4 * bias.len() as u64);
        let matrix = |piece: &HeldPiece| piece.matrix.as_ref().map_or(0, |m| m.bytes().0);
        self.pieces.iter().map(|piece| bias(piece) + matrix(piece)).sum()
    }
}

impl Shard {
    /// Makes the part of `device`, whose weights come from disk: what stays is read into memory, the rest
    /// stands in a file in `directory`, which is written first where it is not there yet, and then stands
    /// in the place of the device's other ones. `progress` is told the bytes that were written or read.
    ///
    /// # Errors
    /// As [`Shard::load`], and when the file cannot be written.
    pub fn stream(
        dir: Arc<ModelDir>,
        device: &DevicePlan,
        directory: &Path,
        progress: Progress<'_>,
    ) -> Result<Self, WeightError> {
        let Some(streaming) = &device.streaming else { return Self::load(dir, device, progress) };
        let format = planned(&dir, streaming)?;
        let graph = Arc::new(OperatorGraph::of(dir.spec()));
        phases_fit(&graph, device)?;
        let formats = EngineChoice::Cpu.holds(dir.formats());
        let pieces: Arc<[Piece]> = pieces::of_device(&graph, &formats, device).into();
        let identity = pieces::identity(dir.fingerprint(), &pieces);
        let first = u64::from_be_bytes(identity.first_chunk().copied().unwrap_or_default());
        let name = format!("{}-{first:016x}.shard", device.name);
        let path = directory.join(&name);
        let ask = Ask { path: &path, identity, pieces: &pieces };
        let opened = match ask.open() {
            Ok(opened) => opened,
            Err(why) => {
                tracing::info!(%why, "the shard is written");
                // Others of the device go first: there may not be room for two.
                remove_others(directory, &device.name, &name);
                write(&dir, (&graph, format), &ask, progress)?;
                ask.open()?
            }
        };
        let buffer = streaming.buffer;
        let no_room = |held| move |NoRoom| WeightError::Memory { wanted: buffer, held };
        let remake = remake(dir.clone(), (graph.clone(), format), pieces.clone());
        let ring = Ring::new(buffer.0).map_err(no_room(Bytes(0)))?;
        let stream = Arc::new(Stream::new(opened, ring, streaming.agents, Box::new(remake)));
        let mut quiet = |_, _| ControlFlow::Continue(());
        let mut loader = Loader::new(&dir, Bytes(0), &mut quiet);
        let mut shard = loader.common(dir.clone(), graph.clone(), &|layer| layer)?;
        let stays = |at: usize| streaming.keeps(at as u32);
        let kept = (0..).zip(&*pieces).filter(|(at, _)| stays(*at)).map(|(_, p)| p.stored());
        let all: u64 = kept.sum();
        let mut held = Vec::with_capacity(pieces.len());
        let mut read = 0;
        for (at, piece) in pieces.iter().enumerate() {
            let layout = layout(&graph, piece);
            let matrix = match stays(at) {
                false => None,
                true => {
                    // Through the buffer, which has nothing to do yet.
                    let place = 0..piece.stored();
                    let matrix = if place.end <= stream.bytes() {
                        stream.load(at, place.clone())?;
                        let bytes = stream.piece(place).map_err(StreamError::from)?;
                        HeldMatrix::of_raw(layout, format, &bytes)
                    } else {
                        let mut room = Ring::new(place.end).map_err(no_room(Bytes(read)))?;
                        let room = &mut room.all()[..place.end as usize];
                        stream.read(at, room)?;
                        HeldMatrix::of_raw(layout, format, room)
                    };
                    read += piece.stored();
                    if progress(read, all).is_break() {
                        return Err(WeightError::Stopped);
                    }
                    Some(matrix.map_err(no_room(Bytes(read)))?)
                }
            };
            let biases = graph.product(piece.operator).into_iter().flat_map(|p| graph.biases(p));
            held.push(HeldPiece { layout, matrix, bias: loader.bias(biases, &piece.slices)? });
        }
        let places = pieces.iter().map(|piece| (piece.operator, piece.columns.start()));
        let by_place = places.zip(0..).collect();
        shard.streamed = Some(Streamed { pieces: held, by_place, format, stream });
        shard.take_shares(&device.holds());
        Ok(shard)
    }

    /// What brings its weights from disk, if something does.
    pub fn streams(&self) -> Option<Arc<Stream>> {
        self.streamed.as_ref().map(|streamed| streamed.stream.clone())
    }
}

/// Removes the device's files but one, and what of another was not finished.
fn remove_others(directory: &Path, device: &DeviceName, kept: &str) {
    let mine = format!("{device}-");
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let shard = name.strip_suffix(".part").unwrap_or(&name).strip_suffix(".shard");
        let of = shard.and_then(|name| name.strip_prefix(&mine));
        let is_one = of.is_some_and(|hex| hex.len() == 16 && !hex.contains('-'));
        if is_one && !name.starts_with(kept) {
            // That it stays takes room, and nothing else.
            drop(std::fs::remove_file(entry.path()));
        }
    }
}

/// How values stand in the file: widened to f32, or as the model has them.
fn planned(dir: &ModelDir, streaming: &Streaming) -> Result<WeightFormat, WeightError> {
    let (planned, stored) = (streaming.format, EngineChoice::Cpu.holds(dir.formats()).most());
    match planned == WeightFormat::F32 || planned == stored {
        true => Ok(planned),
        false => Err(WeightError::Format { planned, stored }),
    }
}

fn layout(graph: &OperatorGraph, piece: &Piece) -> Layout {
    let inputs = piece.slices.first().map_or(0..0, |part| part.inputs.clone());
    let outputs = piece.slices.iter().map(|part| part.outputs.len()).sum();
    let gated = graph.product(piece.operator).is_some_and(|product| product.gated);
    Layout { inputs: inputs.len(), outputs, gated, first: inputs.start as usize }
}

/// Writes the file of a shard.
fn write(
    dir: &ModelDir,
    (graph, format): (&OperatorGraph, WeightFormat),
    ask: &Ask<'_>,
    progress: Progress<'_>,
) -> Result<(), WeightError> {
    let (mut done, all) = (0, ask.bytes());
    let mut quiet = |_, _| ControlFlow::Continue(());
    let mut loader = Loader::new(dir, Bytes(0), &mut quiet);
    ask.write(|at, values| {
        let piece = &ask.pieces[at];
        made(&mut loader, format, layout(graph, piece), piece, values)?;
        done += piece.stored();
        match progress(done, all) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WeightError::Stopped.into()),
        }
    })?;
    Ok(())
}

/// What makes a piece anew.
fn remake(
    dir: Arc<ModelDir>,
    (graph, format): (Arc<OperatorGraph>, WeightFormat),
    pieces: Arc<[Piece]>,
) -> impl Fn(usize, &mut [u8]) -> Result<(), StreamError> + Send + Sync {
    move |at, into| {
        let piece = &pieces[at];
        let mut quiet = |_, _| ControlFlow::Continue(());
        let mut loader = Loader::new(&dir, Bytes(0), &mut quiet);
        let values = &mut into[..piece.bytes as usize];
        Ok(made(&mut loader, format, layout(&graph, piece), piece, values)?)
    }
}

/// The values of a piece, from the model's files.
fn made(
    loader: &mut Loader<'_>,
    format: WeightFormat,
    layout: Layout,
    piece: &Piece,
    values: &mut [u8],
) -> Result<(), WeightError> {
    loader.piece(&piece.slices, layout, format, values)
}
