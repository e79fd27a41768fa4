//! An opened model directory: its spec, and where each of its tensors lies.

mod values;

use crate::{
    config::{self, Fields},
    error::ModelError,
    family::{self, Described, Family, full},
    fields,
    formats::Formats,
    generation::Generation,
    gguf::{self, CheckpointView},
    heads,
    manifest::Manifest,
    matrix::{MatrixSource, Storage},
    proof::Proof,
    quantisation::{Quantisation, named_fingerprint, of_fingerprint},
    recognise,
    sentence::{self, SentenceConfig},
    small_file::{MAX_JSON_BYTES, read_bounded},
    spec::*,
    store::{Arrivals, Listed, Store},
    tensor::{Matrix, Table, Vector},
    unknown_fields,
    warning::Warning,
};
use galaxy_common::{Activations, WeightFormat};
use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};
use values::Run;

/// An opened model: a Hugging Face directory, a GGUF file, or a model that arrives in pieces.
///
/// Holds its files open and their headers in memory; tensors are read when they are asked for. Can be shared between
/// threads: reads are positioned.
pub struct ModelDir {
    /// The directory of the model's own files: config, weights, tokenizer.
    path: PathBuf,
    /// The directory that was opened; sentence-transformers may put the model's own files into one inside it.
    root: PathBuf,
    name: String,
    spec: ModelSpec,
    family: &'static Family,
    prefix: &'static str,
    /// The name of the token embedding table: of a tied head, the head's name where only that tensor is there.
    token_embedding: &'static str,
    fingerprint: String,
    formats: Formats,
    /// To how many bits matrices are rounded as they are read, if they are.
    quantisation: Option<Quantisation>,
    store: Store,
    /// The proof that reads are compared by, if they are.
    proof: OnceLock<Arc<Proof>>,
    /// Keeps the small files that were written for a GGUF file, at `path`, until the model is dropped.
    view: Option<CheckpointView>,
    warnings: Vec<Warning>,
    /// The token embedding table and the position table, each looked up when rows of it are first read.
    tables: [OnceLock<(String, u32, Run)>; 2],
}

impl ModelDir {
    /// Opens a directory with `config.json` and `model.safetensors`, or the shards of
    /// `model.safetensors.index.json`. Reads headers only.
    ///
    /// # Errors
    /// When a file is missing or damaged, the config describes what this build does not know, or
    /// a tensor that the spec needs is missing, or has another shape or an unknown type.
    pub fn open(root: &Path) -> Result<Self, ModelError> {
        if let Some(file) = gguf::meant(root) {
            return Self::open_gguf(&file);
        }
        let path = &sentence::model_place(root);
        let config_path = path.join("config.json");
        if !config_path.is_file() {
            return Err(recognise::directory(path, "config.json"));
        }
        recognise::quantised(path)?;
        let bytes = read_bounded(&config_path, MAX_JSON_BYTES)?;
        let store = Store::open(path)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(&bytes);
        store.digest(&mut hasher)?;
        let fingerprint = hasher.finalize().to_hex().to_string();
        let mut model = Self::assemble(path, base_name(root), fingerprint, &bytes, store)?;
        let doubled = config::doubled(&bytes);
        if !doubled.is_empty() {
            let text = format!("{} stand twice: the last is read", fields::listed(&doubled));
            model.warnings.push(Warning { path: config_path, text });
        }
        root.clone_into(&mut model.root);
        model.warnings.extend(unknown_fields::look_over(path));
        model.warnings.extend(sentence::look_over(root));
        model.warnings.extend(recognise::beside(path));
        if model.spec.causal && matches!(model.spec.head, HeadSpec::Language { .. }) {
            model.warnings.extend(model.generation().ok().and_then(Generation::warning));
        }
        let mut model = model.checked()?;
        model.warnings.extend(model.unused()?);
        Ok(model)
    }

    /// Opens a GGUF file, with all its parts where the model is split over several. Reads headers only.
    ///
    /// # Errors
    /// As for [`ModelDir::open`].
    pub(crate) fn open_gguf(file: &Path) -> Result<Self, ModelError> {
        let mut parts = gguf::parts(file)?;
        gguf::read_divisors(&mut parts)?;
        gguf::read_dense(&mut parts)?;
        let view = CheckpointView::write(&parts[0].2, file)?;
        let unknown = parts[0].2.unknown();
        let store = Store::of_gguf(parts)?;
        let bytes = read_bounded(&view.path().join("config.json"), MAX_JSON_BYTES)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(&bytes);
        store.digest(&mut hasher)?;
        let fingerprint = hasher.finalize().to_hex().to_string();
        // For messages, the config counts as part of the GGUF file.
        let model = Self::assemble(file, base_name(file), fingerprint, &bytes, store)?;
        let mut model = model.checked()?;
        model.warnings.extend(model.unused()?);
        if !unknown.is_empty() {
            let text = format!("{} are not known here, and not done", fields::listed(&unknown));
            model.warnings.push(Warning { path: file.to_owned(), text });
        }
        (model.path, model.root) = (view.path().to_owned(), view.path().to_owned());
        model.view = Some(view);
        model.warnings.extend(model.generation().ok().and_then(Generation::warning));
        Ok(model)
    }

    /// Opens a model whose `data` arrives in pieces. Nothing of it need be there yet: reads wait for what they need.
    /// `path` is for messages.
    ///
    /// # Errors
    /// As for [`ModelDir::open`], and [`ModelError::Manifest`] for a manifest that does not fit its own config.
    pub fn arriving(
        manifest: &Manifest,
        path: &Path,
        data: File,
        arrivals: Arc<dyn Arrivals>,
    ) -> Result<Self, ModelError> {
        let mut model = Self::outline(manifest, path)?;
        let pieces = manifest.cut(&model)?;
        model.store.arrive(data, arrivals);
        for cut in pieces.cuts() {
            model.store.lay(&cut.name, cut.at, cut.tile);
        }
        model.checked()
    }

    /// The model that a manifest describes, without any data.
    pub(crate) fn outline(manifest: &Manifest, path: &Path) -> Result<Self, ModelError> {
        let store = Store::outline(path, manifest.tensors())?;
        let name = manifest.name().to_owned();
        let fingerprint = manifest.fingerprint().to_owned();
        Self::assemble(path, name, fingerprint, manifest.config(), store)
    }

    /// Reads the config, and finds out under which prefix the tensors are named.
    fn assemble(
        path: &Path,
        name: String,
        fingerprint: String,
        config: &[u8],
        mut store: Store,
    ) -> Result<Self, ModelError> {
        let config_path = path.join("config.json");
        let value = config::parse(&config_path, config)?;
        let config = Fields::new(&config_path, &value)?;
        let Described { family, mut spec, mut warnings } = family::read(&config)?;
        warnings.extend(store.combine()?);
        // GGUF files store the weights of norms whole.
        spec.norms_from_one &= !store.is_of_gguf();
        let first = match spec.patches {
            Some(_) => family.names.position,
            None => family.names.word,
        };
        // The embedding table decides which prefix all names have, or a matrix of the first layer where there is no
        // table.
        let found = |name: &str| {
            let mut prefixes = family.prefixes.iter().copied();
            prefixes.find(|prefix| store.has(&full(prefix, name, 0, ".weight")))
        };
        let prefix = found(first).or_else(|| found(family.names.query)).ok_or_else(|| {
            let tensor = full("", first, 0, ".weight");
            ModelError::MissingTensor { path: path.to_owned(), tensor }
        })?;
        let top = heads::match_head(&store, family, prefix, &mut spec)?;
        warnings.extend(top.warning.map(|text| Warning { path: config_path.clone(), text }));
        let (path, root) = (path.to_owned(), path.to_owned());
        let tables = [OnceLock::new(), OnceLock::new()];
        Ok(Self {
            path,
            root,
            name,
            spec,
            family,
            prefix,
            token_embedding: top.token_embedding,
            fingerprint,
            formats: Formats::default(),
            quantisation: None,
            store,
            proof: OnceLock::new(),
            view: None,
            warnings,
            tables,
        })
    }

    /// Checks that every tensor that the spec needs is there, and notes in which format each is.
    pub(crate) fn checked(self) -> Result<Self, ModelError> {
        if self.spec.patches.is_none() {
            self.table(Table::Word)?;
        }
        if matches!(self.spec.positions, Positions::Learned { .. }) {
            self.table(Table::Position)?;
        }
        let (mut matrices, mut vectors) = (Vec::new(), None);
        for which in Matrix::all(&self.spec) {
            let source = self.matrix(which)?;
            let values = u64::from(source.rows()) * u64::from(source.columns());
            matrices.push((which, source.format(), values));
        }
        for which in Vector::all(&self.spec) {
            vectors = vectors.or(Some(self.run(which)?.format));
        }
        let values = |format: &WeightFormat| {
            let alike = matrices.iter().filter(|(_, of, _)| of == format);
            alike.map(|(.., values)| values).sum::<u64>()
        };
        let most = WeightFormat::ALL.into_iter().max_by_key(values).unwrap_or_default();
        let all = Formats::all(most).with_vectors(vectors.unwrap_or(most));
        let formats =
            matrices.iter().fold(all, |all, (which, format, _)| all.with(*which, *format));
        Ok(Self { formats, ..self })
    }

    /// The same model, for devices that compute with these activations.
    ///
    /// # Errors
    /// When activations are to have 8 bits, and no matrix is in blocks of few bits.
    pub fn with_activations(mut self, activations: Activations) -> Result<Self, ModelError> {
        if activations == Activations::A8 && !self.formats.has_blocks() {
            return Err(ModelError::NoBlocks { name: self.name });
        }
        self.formats = self.formats.with_activations(activations);
        Ok(self)
    }

    /// The base name of what was opened; of an arriving model, the name in its manifest.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// The directory of its own files: config, weights, tokenizer.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// The directory that was opened. A sentence-transformers model may have its own files in a directory inside it.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// What was opened: the directory or the GGUF file.
    pub fn opened(&self) -> &Path {
        self.view.as_ref().map_or(&self.root, |view| view.file())
    }
    /// The description of the model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }
    /// A digest of the config, of all tensors' names, types, shapes and places, and of a sample of their contents. It
    /// tells models apart, and does not prove that every byte is the same.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }
    /// The [`ModelDir::fingerprint`] of the files alone, whatever the matrices are rounded to.
    pub fn files_fingerprint(&self) -> &str {
        of_fingerprint(&self.fingerprint).0
    }
    /// To how many bits matrices are rounded as they are read, if they are.
    pub fn quantisation(&self) -> Option<Quantisation> {
        self.quantisation
    }
    /// Adds a warning to [`ModelDir::warnings`].
    pub(crate) fn warn(&mut self, warning: Warning) {
        self.warnings.push(warning);
    }
    /// Rounds matrices from now on. The formats are out of date until `checked` has run again.
    pub(crate) fn round_to(&mut self, to: Quantisation) {
        self.fingerprint = named_fingerprint(&self.fingerprint, to);
        (self.quantisation, self.tables) = (Some(to), [OnceLock::new(), OnceLock::new()]);
    }
    /// Warnings about what the files say and this build ignores or reads otherwise.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }
    /// Compares everything that is read from now on with the manifest: reads of what differs fail with
    /// [`ModelError::Piece`].
    pub fn prove(&self, proof: Arc<Proof>) {
        let admitting = Arc::clone(&proof);
        let admit = move |store: &Store, shard, bytes| admitting.admit(store, shard, bytes);
        // A second proof would compare with the same manifest.
        if self.store.admit_by(Box::new(admit)) {
            drop(self.proof.set(proof));
        }
    }
    /// The proof that reads are compared by, if there is one.
    pub fn proof(&self) -> Option<&Arc<Proof>> {
        self.proof.get()
    }
    /// Reads the settings of generation in the model's files.
    ///
    /// # Errors
    /// When a file is there and cannot be read, or has a value out of range.
    pub fn generation(&self) -> Result<Generation, ModelError> {
        Generation::read(&self.path)
    }
    /// Reads `modules.json` and the files that it names, with their weights.
    ///
    /// # Errors
    /// When a file is damaged, or asks for something that this build does not support.
    pub fn sentence(&self) -> Result<SentenceConfig, ModelError> {
        sentence::read(&self.root, Some(self.spec.hidden))
    }
    /// The format of each matrix, and the activations that devices compute with.
    pub fn formats(&self) -> &Formats {
        &self.formats
    }
    /// The format that most of the weights have, for names and messages.
    pub fn format(&self) -> WeightFormat {
        self.formats.most()
    }

    /// A matrix of the model, from which parts can be read.
    ///
    /// # Errors
    /// When the model has no such matrix.
    pub fn matrix(&self, which: Matrix) -> Result<MatrixSource<'_>, ModelError> {
        let absent = || ModelError::NotInModel { what: format!("{which:?}") };
        let (inputs, outputs) = which.shape(&self.spec).ok_or_else(absent)?;
        let names = &self.family.names;
        let tied = matches!(self.spec.head, HeadSpec::Language { tied: true, .. });
        let (pattern, layer) = match which {
            Matrix::Query(l) => (names.query, l),
            Matrix::Key(l) => (names.key, l),
            Matrix::Value(l) => (names.value, l),
            Matrix::AttentionOutput(l) => (names.attention_output, l),
            Matrix::Gate(l) => (names.gate, l),
            Matrix::Up(l) => (names.up, l),
            Matrix::Down(l) => (names.down, l),
            Matrix::Patch => (names.patch, 0),
            Matrix::ClassDense => (names.class_dense, 0),
            Matrix::ClassOutput => (names.class_output, 0),
            Matrix::LanguageHead if tied => (self.token_embedding, 0),
            Matrix::LanguageHead => (names.language_head, 0),
        };
        let in_layer = pattern.contains("{}");
        let storage = if in_layer { self.family.storage } else { Storage::OutputRows };
        let first_output = self.before(which);
        let (stored_inputs, stored_outputs) = (u64::from(inputs), self.stored(which));
        let shape = match storage {
            Storage::OutputRows => [stored_outputs, stored_inputs],
            Storage::InputRows => [stored_inputs, stored_outputs],
        };
        let name = self.full(pattern, layer, ".weight");
        // The patch projection is stored as a convolution.
        let square = self.spec.patches.filter(|_| which == Matrix::Patch);
        let square = square.map(|p| [outputs, p.channels, p.size, p.size].map(u64::from));
        let stored = square.as_ref().map_or(&shape[..], |square| &square[..]);
        let (tensor, stored) = self.store.tensor(&name, stored)?;
        let rounded = self.quantisation.and_then(|to| to.format(which, inputs));
        Ok(MatrixSource {
            store: &self.store,
            shard: tensor.shard,
            offset: tensor.offset,
            name,
            format: rounded.unwrap_or(stored),
            stored,
            storage,
            pitch: shape[1],
            height: shape[0],
            tile: match tensor.tile {
                0 => shape[1],
                bytes => match stored.block() {
                    Some(block) => bytes / u64::from(block.bytes) * u64::from(block.values),
                    None => bytes / stored.bytes(1, 1),
                },
            },
            first_output,
            paired: tensor.paired,
            inputs,
            outputs,
        })
    }

    /// The matrices that share a tensor with this one, itself included, in their order in the tensor.
    fn beside(&self, which: Matrix) -> Vec<Matrix> {
        let names = &self.family.names;
        match which {
            Matrix::Query(l) | Matrix::Key(l) | Matrix::Value(l) if names.query == names.key => {
                vec![Matrix::Query(l), Matrix::Key(l), Matrix::Value(l)]
            }
            Matrix::Gate(l) | Matrix::Up(l) if names.gate == names.up => {
                vec![Matrix::Gate(l), Matrix::Up(l)]
            }
            which => vec![which],
        }
    }

    /// Outputs of the tensor that holds this matrix.
    fn stored(&self, which: Matrix) -> u64 {
        self.beside(which).into_iter().map(|one| u64::from(self.outputs(one))).sum()
    }

    /// Outputs of that tensor before those of this matrix.
    fn before(&self, which: Matrix) -> u64 {
        let all = self.beside(which).into_iter();
        all.take_while(|one| *one != which).map(|one| u64::from(self.outputs(one))).sum()
    }

    fn outputs(&self, which: Matrix) -> u32 {
        which.shape(&self.spec).map_or(0, |(_, outputs)| outputs)
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }
    /// The name of the tensor that holds a vector.
    pub(crate) fn vector_name(&self, which: Vector) -> Result<String, ModelError> {
        self.run(which).map(|run| run.name)
    }
    /// Bytes that a tensor takes in the file.
    pub(crate) fn tensor_bytes(&self, name: &str) -> Result<u64, ModelError> {
        self.store.listed(name).map(|(tensor, _)| tensor.bytes)
    }
    /// A tensor's name, type and shape, as a manifest lists them.
    pub(crate) fn listed(&self, name: &str) -> Result<Listed, ModelError> {
        self.store.listed(name).map(|(_, listed)| listed)
    }

    fn full(&self, pattern: &str, layer: u32, ending: &str) -> String {
        full(self.prefix, pattern, layer, ending)
    }
}

impl std::fmt::Debug for ModelDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelDir")
            .field("path", &self.path)
            .field("fingerprint", &self.fingerprint)
            .finish_non_exhaustive()
    }
}

fn base_name(path: &Path) -> String {
    // "." and ".." have no base name of their own.
    let name = match path.file_name() {
        Some(name) => Some(name.to_owned()),
        None => path.canonicalize().ok().and_then(|p| p.file_name().map(ToOwned::to_owned)),
    };
    name.map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests;
