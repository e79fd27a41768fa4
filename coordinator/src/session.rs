//! The session: from requests to batches, through the queue, and from results to answers.

mod answer;
mod batch;
mod generate;
mod texts;

use crate::{
    admission::Admission,
    client_memory::{Caller, ClientMemory},
    error::{self, RequestError},
    fair::Fair,
    fleet::{DeviceCost, DeviceView, Fleet, Outlook, Readiness, blocking},
    trace::{Trace, TraceLog},
};
pub use generate::{Finish, Listener, Said};
pub use texts::{Classes, Embed, Embeddings, Items, Prefix, Scores};

use answer::{Answer, Outcome, Vectors};
use batch::{Content, Sequence};
use galaxy_common::{Bytes, DeviceName, Epoch, RequestId, Wanted};
use galaxy_model::{
    HeadSpec, ModelDir, ModelSpec,
    generation::Generation,
    image::{ImageError, ImageProcessor},
    sentence::{CrossEncoder, SentenceConfig},
    tokenizer::Tokenizer,
};
use std::{
    future::Future,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// Texts that one request may have; the SDK sends more in parts.
pub const MAX_TEXTS: usize = 1024;
/// Bytes of results that one request may ask for.
pub const MAX_RESULT_BYTES: u64 = 512 << 20;
/// How long a request waits for a cluster that is not ready. A loss takes up to 3 s to be seen, and
/// within 5 s its request shall know.
const READY_WAIT: Duration = Duration::from_secs(2);
/// What a request that does not say its time gets on top of the limit: a program that runs into it
/// then ends first, and its error names a device.
const GRACE: Duration = Duration::from_millis(500);

/// What a session grants.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests that wait while one runs.
    pub queue: usize,
    /// How long a request may take that does not say.
    pub timeout: Duration,
    /// What one client may hold of this process's memory.
    pub client_memory: Bytes,
}

/// What the raw door is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunOutput {
    /// The model's own pooling and normalisation, as for [`Session::embed`].
    Sentence,
    /// One of the outputs, as it is.
    Wanted(Wanted),
}

/// One sequence of the raw door.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Token ids.
    Tokens(Vec<u32>),
    /// An image file, PNG or JPEG.
    Image(Vec<u8>),
    /// Values of an image as the model reads them: `[channels, height, width]`.
    Pixels(Vec<f32>),
}

/// What a request cost.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Its number, for a trace.
    pub request: RequestId,
    /// The epoch of its last program.
    pub epoch: Epoch,
    /// Waiting for readiness and for the turn.
    pub queue: Duration,
    /// Tokenising, or reading images.
    pub tokenize: Duration,
    /// Programs on the devices.
    pub execute: Duration,
    /// Tokens in all, or rows of images.
    pub tokens: u64,
    /// Programs.
    pub programs: u32,
    /// Sums over the programs, by device.
    pub devices: Vec<(DeviceName, DeviceCost)>,
}

/// One result of the raw door.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Extents, the outermost first.
    pub shape: Vec<u32>,
    /// Values, row after row.
    pub values: Vec<f32>,
}

/// Results of the raw door.
#[derive(Debug, Clone)]
pub struct Tensors {
    /// One for each sequence, in their order.
    pub tensors: Vec<Tensor>,
    /// What it cost.
    pub report: Report,
    /// The memory that they are counted as, until they are taken.
    pub held: Caller,
}

/// A session over a fleet. Copies are the same session.
#[derive(Clone)]
pub struct Session {
    inner: Arc<Inner>,
    /// Whose requests these are.
    caller: Caller,
}

struct Inner {
    model: Arc<ModelDir>,
    fleet: Arc<dyn Fleet>,
    admission: Admission,
    memory: ClientMemory,
    limits: Limits,
    /// Without one: why.
    tokenizer: Result<Tokenizer, String>,
    /// Without one: why.
    sentence: Result<Arc<SentenceConfig>, String>,
    /// Without one: whether the model is none, and why.
    cross_encoder: Result<CrossEncoder, (bool, String)>,
    /// Without it: why.
    generation: Result<Generation, String>,
    /// Without one: why. Of a model of images only.
    images: Option<Result<ImageProcessor, String>>,
    log: Mutex<TraceLog>,
    /// Room for texts that go on, in rows.
    room: Fair,
    /// Texts that went on.
    slots: AtomicU32,
    requests: AtomicU64,
    served: AtomicU64,
    failed: AtomicU64,
    /// Programs that ran to their end.
    programs: AtomicU64,
}

impl Session {
    /// A session over `fleet`. Reads the tokenizer: blocks.
    pub fn new(model: Arc<ModelDir>, fleet: Arc<dyn Fleet>, limits: Limits) -> Self {
        let sentence = model.sentence().map_err(|e| e.to_string());
        let generation = model.generation().map_err(|e| e.to_string());
        let cross_encoder = model.cross_encoder().map_err(|e| (e.is_caller(), e.to_string()));
        let lower_case = match (&sentence, &cross_encoder) {
            (Ok(sentence), _) => sentence.lower_case,
            (Err(_), Ok(cross_encoder)) => cross_encoder.lower_case,
            (Err(_), Err(_)) => false,
        };
        let tokenizer = Tokenizer::open(model.path());
        let tokenizer = tokenizer.map_err(|e| e.to_string()).map(|mut tokenizer| {
            if lower_case {
                tokenizer.lower_case();
            }
            tokenizer
        });
        let images = |patches| ImageProcessor::open(model.path(), patches);
        let images = model.spec().patches.map(|p| images(p).map_err(|e| e.to_string()));
        let memory = ClientMemory::new(limits.client_memory);
        let inner = Inner {
            admission: Admission::new(limits.queue),
            memory: memory.clone(),
            room: Fair::new(fleet.outlook().cache.rows),
            slots: AtomicU32::new(0),
            log: Mutex::new(TraceLog::default()),
            requests: AtomicU64::new(0),
            served: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            programs: AtomicU64::new(0),
            model,
            fleet,
            limits,
            tokenizer,
            sentence: sentence.map(Arc::new),
            cross_encoder,
            generation,
            images,
        };
        Self { inner: Arc::new(inner), caller: memory.caller(None) }
    }

    /// The same session, for a request of this caller.
    pub fn of(&self, caller: Option<Caller>) -> Self {
        let caller = caller.unwrap_or_else(|| self.inner.memory.caller(None));
        Self { inner: self.inner.clone(), caller }
    }
    /// What clients may hold.
    pub fn client_memory(&self) -> &ClientMemory {
        &self.inner.memory
    }
    /// Whose requests these are.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The model.
    pub fn model(&self) -> &ModelDir {
        &self.inner.model
    }
    /// What the fleet was asked for, and what it makes of it.
    pub fn outlook(&self) -> Outlook {
        self.inner.fleet.outlook()
    }
    /// The devices, for a status.
    pub fn devices(&self) -> Vec<DeviceView> {
        self.inner.fleet.devices()
    }
    /// Whether programs may run now.
    pub fn readiness(&self) -> Readiness {
        self.inner.fleet.readiness().borrow().clone()
    }
    /// The queue.
    pub fn admission(&self) -> &Admission {
        &self.inner.admission
    }
    /// Requests that were answered, and requests that failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.inner.served.load(Ordering::Relaxed), self.inner.failed.load(Ordering::Relaxed))
    }

    /// The raw door: token ids or images in, tensors out.
    ///
    /// # Cancel safety
    /// As [`Session::embed`].
    ///
    /// # Errors
    /// Each kind is its own variant.
    pub async fn run(
        &self,
        sequences: Vec<Input>,
        output: RunOutput,
        timeout: Option<Duration>,
    ) -> Result<Tensors, RequestError> {
        let work = async {
            let (wanted, outcome) = match output {
                RunOutput::Sentence => {
                    let sentence = self.sentence()?.clone();
                    (sentence.wanted(), Outcome::Vectors(Vectors::of(sentence)))
                }
                RunOutput::Wanted(wanted) => (self.supported(wanted)?, Outcome::AsItIs),
            };
            self.check(&sequences, wanted)?;
            let mut answer = self.begin()?.within(timeout);
            let (sequences, took) = self.prepare(sequences).await?;
            answer.tokenized(took);
            let tensors = answer.run(sequences, wanted, outcome).await?;
            Ok(Tensors { tensors, report: answer.end(), held: self.caller.clone() })
        };
        self.timed(timeout, work).await
    }

    /// The measured lanes of a request that ran lately; of the last one for 0.
    ///
    /// # Errors
    /// [`RequestError::NoTrace`] when it is not kept any more.
    pub async fn trace(&self, request: u64) -> Result<Trace, RequestError> {
        let entry = {
            let log = self.inner.log.lock().unwrap_or_else(PoisonError::into_inner);
            log.find(request)?
        };
        let mut timelines = Vec::with_capacity(entry.programs.len());
        let (mut last, mut missing) = (None, 0);
        for program in &entry.programs {
            match self.inner.fleet.timelines(program.epoch, program.sequence).await {
                Ok(times) => timelines.push((program.clone(), times)),
                // Long requests have more programs than devices keep: the others are shown.
                Err(error) => {
                    missing += 1;
                    last = Some(error);
                }
            }
        }
        if let (true, Some(error)) = (timelines.is_empty(), last) {
            return Err(error);
        }
        let spec = self.spec().clone();
        blocking(move || Trace::new(&spec, entry.request, timelines, missing)).await?
    }

    /// Takes no more requests, and waits until those that were taken are answered.
    pub async fn drain(&self) {
        self.inner.admission.drain(true);
        self.inner.admission.idle().await;
    }

    /// Lets go of the devices.
    pub async fn close(&self) {
        self.inner.fleet.close().await;
    }

    fn spec(&self) -> &ModelSpec {
        self.inner.model.spec()
    }

    fn sentence(&self) -> Result<&Arc<SentenceConfig>, RequestError> {
        let why = |why: &String| RequestError::Model { why: why.clone() };
        self.inner.sentence.as_ref().map_err(why)
    }

    /// Most tokens of a text, and what limits them; `by_files` may be what the model's files say.
    fn text_limit(&self, by_files: Option<(u32, &'static str)>) -> (u32, &'static str) {
        let limits = [
            (self.spec().position_limit(), self.spec().limited_by()),
            (self.outlook().max_rows, error::MAX_ROWS),
            by_files.unwrap_or((u32::MAX, "nothing")),
        ];
        limits.into_iter().min_by_key(|(limit, _)| *limit).expect("the array has three elements")
    }

    /// The output as this model has it.
    fn supported(&self, wanted: Wanted) -> Result<Wanted, RequestError> {
        let refuse = |name: &str, why: &str| RequestError::UnsupportedOutput {
            model: self.inner.model.name().to_owned(),
            wanted: name.to_owned(),
            why: why.to_owned(),
        };
        match (&self.spec().head, wanted) {
            (_, Wanted::Token(_) | Wanted::Nothing) => {
                Err(refuse("tokens", "the raw door gives tensors: ask for logits"))
            }
            (_, Wanted::Hidden | Wanted::Pooled(_)) => Ok(wanted),
            (HeadSpec::Classes(_), Wanted::Classes | Wanted::LastLogits) => Ok(Wanted::Classes),
            (HeadSpec::Language { .. }, Wanted::LastLogits | Wanted::AllLogits) => Ok(wanted),
            (HeadSpec::Language { .. }, Wanted::Classes) => {
                Err(refuse("classes", "it predicts the next token: ask for logits"))
            }
            (HeadSpec::Classes(_), Wanted::AllLogits) => {
                Err(refuse("logits of all rows", "it classifies whole texts: ask for logits"))
            }
            (HeadSpec::None, wanted) => {
                let name = if wanted == Wanted::Classes { "classes" } else { "logits" };
                let why = self.spec().headless.as_deref();
                let why = why.unwrap_or("nothing stands on top of its layers");
                Err(refuse(name, &format!("{why}: ask for pooled or hidden")))
            }
        }
    }

    /// Checks what the raw door was given, as far as it can be seen before images are read.
    fn check(&self, sequences: &[Input], wanted: Wanted) -> Result<(), RequestError> {
        let spec = self.spec();
        check_count(sequences.len(), "sequences")?;
        let limit = self.text_limit(None);
        let mut rows = 0;
        for (index, input) in sequences.iter().enumerate() {
            let Input::Tokens(ids) = input else {
                rows += spec.patches.map_or(0, |patches| u64::from(patches.rows()));
                continue;
            };
            rows += ids.len() as u64;
            self.check_ids(index, ids, limit)?;
        }
        let values = match wanted {
            Wanted::Hidden => rows * u64::from(spec.hidden),
            Wanted::AllLogits => rows * u64::from(spec.vocabulary),
            Wanted::LastLogits => sequences.len() as u64 * u64::from(spec.vocabulary),
            Wanted::Pooled(_) | Wanted::Classes | Wanted::Token(_) | Wanted::Nothing => 0,
        };
        if values * 4 > MAX_RESULT_BYTES {
            return Err(RequestError::ResultTooLarge {
                bytes: values * 4,
                limit: MAX_RESULT_BYTES,
            });
        }
        // Results of devices become one result.
        self.caller.grow(2 * 4 * values)
    }

    /// Checks token ids that a caller gave.
    fn check_ids(
        &self,
        index: usize,
        ids: &[u32],
        (limit, limited_by): (u32, &'static str),
    ) -> Result<(), RequestError> {
        let vocabulary = self.spec().vocabulary;
        if self.spec().patches.is_some() {
            let why = format!("sequence {index} has ids, and this model reads images");
            return Err(RequestError::Invalid { why });
        }
        if ids.is_empty() {
            return Err(RequestError::Invalid { why: format!("sequence {index} has no ids") });
        }
        if ids.len() > limit as usize {
            let (what, tokens) = (format!("sequence {index}"), ids.len());
            return Err(RequestError::TooLong { what, tokens, limit, limited_by });
        }
        match ids.iter().find(|&&id| id >= vocabulary) {
            Some(&token) => Err(RequestError::UnknownToken { index, token, vocabulary }),
            None => Ok(()),
        }
    }

    /// What the raw door was given as rows, where blocking is allowed: images are read.
    async fn prepare(&self, inputs: Vec<Input>) -> Result<(Vec<Sequence>, Duration), RequestError> {
        let session = self.clone();
        let (_wanted, gone) = Gone::pair();
        blocking(move || {
            let begun = Instant::now();
            let each = inputs.into_iter().enumerate();
            let sequences = each.map(|(index, input)| {
                gone.check()?;
                session.sequence(index, input)
            });
            Ok((sequences.collect::<Result<_, _>>()?, begun.elapsed()))
        })
        .await?
    }

    fn sequence(&self, index: usize, input: Input) -> Result<Sequence, RequestError> {
        let invalid =
            |why: String| RequestError::Invalid { why: format!("sequence {index}: {why}") };
        let of_text = || invalid("it is an image, and this model reads text".to_owned());
        let pixels = match input {
            Input::Tokens(ids) => return Ok(ids.into()),
            Input::Pixels(values) => values,
            Input::Image(file) => match self.inner.images.as_ref().ok_or_else(of_text)? {
                Ok(images) => {
                    let wrong = |e: ImageError| invalid(e.to_string());
                    let _decoding = self.caller.briefly(images.needs(&file).map_err(wrong)?)?;
                    images.pixels(&file).map_err(wrong)?
                }
                Err(why) => return Err(RequestError::Model { why: why.clone() }),
            },
        };
        let patches = self.spec().patches.ok_or_else(of_text)?;
        let (have, want) = (pixels.len(), patches.pixels());
        if have != want {
            let shape = [patches.channels, patches.height, patches.width];
            return Err(invalid(format!("it has {have} values, and {shape:?} are {want}")));
        }
        let (rows, limit) = (patches.rows(), self.outlook().max_rows);
        if rows > limit {
            let limited_by = error::MAX_ROWS;
            let (what, tokens) = (format!("sequence {index}"), rows as usize);
            return Err(RequestError::TooLong { what, tokens, limit, limited_by });
        }
        // Its own, and the batch's.
        self.caller.grow(2 * 4 * want as u64)?;
        Ok(Sequence { rows, content: Content::Squares(patches.cut(&pixels)) })
    }

    fn begin(&self) -> Result<Answer<'_>, RequestError> {
        let ticket = self.inner.admission.admit(self.caller.who())?;
        let request = RequestId(self.inner.requests.fetch_add(1, Ordering::Relaxed) + 1);
        let report = Report { request, ..Report::default() };
        Ok(Answer::new(self, ticket, report))
    }

    /// Puts a deadline on `work`, and counts its end.
    async fn timed<T>(
        &self,
        timeout: Option<Duration>,
        work: impl Future<Output = Result<T, RequestError>>,
    ) -> Result<T, RequestError> {
        let allowed = timeout.unwrap_or(self.inner.limits.timeout);
        let late = |_| match self.readiness() {
            // It waited for the cluster all the time, most likely: say for what.
            Readiness::Waiting { device, reason } => {
                Err(RequestError::Unavailable { device, reason })
            }
            Readiness::Ready(_) | Readiness::Moving { .. } => {
                Err(RequestError::Deadline { allowed, ours: timeout.is_none() })
            }
        };
        let wait = if timeout.is_none() { allowed.saturating_add(GRACE) } else { allowed };
        let result = tokio::time::timeout(wait, work).await.unwrap_or_else(late);
        let count = if result.is_ok() { &self.inner.served } else { &self.inner.failed };
        count.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Waits until programs may run, now or after a move, but not beyond `until`.
    async fn ready(&self, until: Instant) -> Result<(), RequestError> {
        let mut readiness = self.inner.fleet.readiness();
        let ready = readiness.wait_for(|r| !matches!(r, Readiness::Waiting { .. }));
        if let Ok(Ok(_)) = tokio::time::timeout_at(until, ready).await {
            return Ok(());
        }
        match self.readiness() {
            Readiness::Ready(_) | Readiness::Moving { .. } => Ok(()),
            Readiness::Waiting { device, reason } => {
                Err(RequestError::Unavailable { device, reason })
            }
        }
    }
}

/// Whether anybody waits still for what a thread makes.
struct Gone(Weak<()>);

impl Gone {
    /// What is kept by who waits, and what is asked by who works.
    fn pair() -> (Arc<()>, Self) {
        let kept = Arc::new(());
        let asked = Self(Arc::downgrade(&kept));
        (kept, asked)
    }

    fn check(&self) -> Result<(), RequestError> {
        match self.0.strong_count() {
            0 => Err(RequestError::Internal { why: "its client is gone".to_owned() }),
            _ => Ok(()),
        }
    }
}

fn check_count(count: usize, what: &'static str) -> Result<(), RequestError> {
    match count {
        0 => Err(RequestError::Nothing { what }),
        1..=MAX_TEXTS => Ok(()),
        _ => Err(RequestError::TooManyTexts { texts: count, limit: MAX_TEXTS }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_limits() {
        assert_eq!(check_count(0, "texts"), Err(RequestError::Nothing { what: "texts" }));
        assert!(check_count(1024, "texts").is_ok());
        let error = check_count(10_000, "texts").expect_err("too many").to_string();
        assert!(error.contains("10000") && error.contains("1024") && error.contains("parts"));
    }
}
