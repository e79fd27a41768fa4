//! A shard whose matrices come from disk, piece by piece, besides those that stay.

use super::{
    AnyMatrix, Progress, Shard, ShardMatrix, WeightError,
    load::Loader,
    matrix::{Layout, NoRoom},
    phases_fit,
};
use crate::stream::{FileRequest, Ring, Stream, StreamError};
use galaxy_common::{Bytes, DeviceName, DevicePlan, Streaming, WeightFormat};
use galaxy_graph::{
    operators::{OperatorGraph, OperatorId},
    pieces::{self, Piece},
};
use galaxy_model::ModelDir;
use std::{
    collections::HashMap,
    ops::{ControlFlow, Range},
    path::Path,
    sync::Arc,
};

/// The matrices of a device whose weights come from disk: those that stay, and those that do not.
#[derive(Debug)]
pub(crate) struct Streamed {
    runs: Vec<ShardRun>,
    /// The run of each matrix, by its product and the first column in that.
    by_place: HashMap<(OperatorId, u32), usize>,
    pub(crate) stream: Arc<Stream>,
}

/// A matrix of a piece, whether it stays or not.
#[derive(Debug)]
struct ShardRun {
    layout: Layout,
    format: WeightFormat,
    /// Its bytes within the piece.
    place: Range<usize>,
    /// Its values, if they stay in memory.
    matrix: Option<ShardMatrix>,
    /// The bias of its columns.
    bias: Option<Vec<f32>>,
}

impl Streamed {
    /// The matrix of a product whose first column is `column`, with the bias of its columns. `read` are the bytes that
    /// the program has loaded for it. None where no matrix of a piece begins there, or it was not loaded.
    pub(crate) fn matrix<'a>(
        &'a self,
        (operator, column): (OperatorId, u32),
        read: Option<&'a [u8]>,
    ) -> Option<(AnyMatrix<'a>, Option<&'a [f32]>)> {
        let run = &self.runs[*self.by_place.get(&(operator, column))?];
        let matrix = match &run.matrix {
            Some(held) => held.into(),
            None => AnyMatrix::of_bytes(run.layout, run.format, read?.get(run.place.clone())?)?,
        };
        Some((matrix, run.bias.as_deref()))
    }

    /// The bytes that stay in memory, without the buffer.
    pub(crate) fn bytes(&self) -> u64 {
        let bias = |run: &ShardRun| run.bias.as_ref().map_or(0, |bias| 4 * bias.len() as u64);
        let matrix = |run: &ShardRun| run.matrix.as_ref().map_or(0, |m| m.bytes().0);
        self.runs.iter().map(|run| bias(run) + matrix(run)).sum()
    }

    /// Adds the matrices of a piece, with `values` if they stay in memory.
    fn add(
        &mut self,
        piece: &Piece,
        values: Option<&[u8]>,
        bias: Option<&[f32]>,
    ) -> Result<(), NoRoom> {
        let (mut column, mut biases) = (piece.columns.start(), 0);
        for (run, place) in piece.places() {
            let layout = Layout::of(run, &piece.slices[run.slices.clone()]);
            let place = place.start as usize..place.end as usize;
            let held =
                |values: &[u8]| ShardMatrix::of_raw(layout, run.format, &values[place.clone()]);
            let matrix = values.map(held).transpose()?;
            // Of a product that has some, each column has one.
            let own = biases..biases + layout.outputs;
            let bias = bias.and_then(|bias| bias.get(own.clone())).map(<[f32]>::to_vec);
            biases = own.end;
            self.by_place.insert((piece.operator, column), self.runs.len());
            column += (if layout.gated { layout.outputs / 2 } else { layout.outputs }) as u32;
            self.runs.push(ShardRun { layout, format: run.format, place, matrix, bias });
        }
        Ok(())
    }
}

impl Shard {
    /// Makes the part of `device`, whose weights come from disk: what stays is read into memory, the rest
    /// stands in a file in `directory`, which is written first where it is not there yet, and then replaces
    /// the device's other ones. `progress` gets the bytes that were written or read.
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
        planned(&dir, streaming)?;
        let graph = Arc::new(OperatorGraph::of(dir.spec()));
        phases_fit(&graph, dir.formats(), device)?;
        let pieces: Arc<[Piece]> = pieces::of_device(&graph, dir.formats(), device).into();
        let identity = pieces::identity(dir.fingerprint(), &pieces);
        let first = u64::from_be_bytes(identity.first_chunk().copied().unwrap_or_default());
        let name = format!("{}-{first:016x}.shard", device.name);
        let path = directory.join(&name);
        let ask = FileRequest { path: &path, identity, pieces: &pieces };
        let opened = match ask.open() {
            Ok(opened) => opened,
            Err(why) => {
                tracing::info!(%why, "the shard is written");
                // Others of the device go first: there may not be room for two.
                remove_others(directory, &device.name, &name);
                write(&dir, &ask, progress)?;
                ask.open()?
            }
        };
        let buffer = streaming.buffer;
        let no_room = |held| move |NoRoom| WeightError::Memory { wanted: buffer, held };
        let remake = remake(dir.clone(), pieces.clone());
        let ring = Ring::new(buffer.0).map_err(no_room(Bytes(0)))?;
        let stream = Arc::new(Stream::new(opened, ring, streaming.loaders, Box::new(remake)));
        let mut quiet = |_, _| ControlFlow::Continue(());
        let mut loader = Loader::new(&dir, Bytes(0), &mut quiet);
        let mut shard = loader.common(dir.clone(), graph.clone(), &|layer| layer)?;
        let stays = |at: usize| streaming.keeps(at as u32);
        let kept = (0..).zip(&*pieces).filter(|(at, _)| stays(*at)).map(|(_, p)| p.stored());
        let all: u64 = kept.sum();
        let mut held =
            Streamed { runs: Vec::new(), by_place: HashMap::new(), stream: stream.clone() };
        let mut read = 0;
        for (at, piece) in pieces.iter().enumerate() {
            let biases = graph.product(piece.operator).into_iter().flat_map(|p| graph.biases(p));
            let bias = loader.bias(biases, &piece.slices)?;
            if !stays(at) {
                held.add(piece, None, bias.as_deref()).map_err(no_room(Bytes(read)))?;
                continue;
            }
            // Through the buffer, which has nothing to do yet.
            let place = 0..piece.stored();
            let added = if place.end <= stream.bytes() {
                stream.load(at, place.clone())?;
                let bytes = stream.piece(place).map_err(StreamError::from)?;
                held.add(piece, Some(&bytes), bias.as_deref())
            } else {
                let mut room = Ring::new(place.end).map_err(no_room(Bytes(read)))?;
                let room = &mut room.all()[..place.end as usize];
                stream.read(at, room)?;
                held.add(piece, Some(room), bias.as_deref())
            };
            read += piece.stored();
            if progress(read, all).is_break() {
                return Err(WeightError::Stopped);
            }
            added.map_err(no_room(Bytes(read)))?;
        }
        shard.streamed = Some(held);
        shard.take_shares(&device.holds());
        Ok(shard)
    }

    /// The stream that brings its weights from disk, if some are not held.
    pub fn streams(&self) -> Option<Arc<Stream>> {
        self.streamed.as_ref().map(|streamed| streamed.stream.clone())
    }
}

/// Removes the device's shard files, finished or not, but the one named `kept`.
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

/// Checks that values can stand in the file as planned: widened to f32, or as the model has them.
fn planned(dir: &ModelDir, streaming: &Streaming) -> Result<(), WeightError> {
    let (planned, stored) = (streaming.format, dir.format());
    match planned == WeightFormat::F32 || planned == stored {
        true => Ok(()),
        false => Err(WeightError::Format { planned, stored }),
    }
}

/// Writes the file of a shard.
fn write(dir: &ModelDir, ask: &FileRequest<'_>, progress: Progress<'_>) -> Result<(), WeightError> {
    let (mut done, all) = (0, ask.bytes());
    let mut quiet = |_, _| ControlFlow::Continue(());
    let mut loader = Loader::new(dir, Bytes(0), &mut quiet);
    ask.write(|at, values| {
        let piece = &ask.pieces[at];
        loader.piece(piece, values)?;
        done += piece.stored();
        match progress(done, all) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WeightError::Stopped.into()),
        }
    })?;
    Ok(())
}

/// The function that fills in the values of a piece anew, from the model's files.
fn remake(
    dir: Arc<ModelDir>,
    pieces: Arc<[Piece]>,
) -> impl Fn(usize, &mut [u8]) -> Result<(), StreamError> + Send + Sync {
    move |at, into| {
        let piece = &pieces[at];
        let mut quiet = |_, _| ControlFlow::Continue(());
        let mut loader = Loader::new(&dir, Bytes(0), &mut quiet);
        let values = &mut into[..piece.bytes as usize];
        Ok(loader.piece(piece, values)?)
    }
}
