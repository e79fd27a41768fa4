//! Fetching: each wanted piece comes from a source that has it, several requests ahead, and its digest is checked
//! before it counts.
//!
//! One task decides. It never touches the disk: pieces go to a writer, which checks their digests and writes them,
//! and from there to a keeper, which syncs them to the disk. Pieces that are in the cache already are checked
//! meanwhile.

use super::{
    ContentError,
    data::{Data, PieceState, bit, keeper},
    links::{ModelServer, Neighbour, News, join, listen},
};
use crate::tasks::on_thread;
use bytes::Bytes as Payload;
use galaxy_common::DeviceName;
use galaxy_proto::{identity::Identity, v1};
use std::{
    collections::{HashMap, VecDeque},
    io,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, MissedTickBehavior},
};

/// The most bytes that one source is asked for ahead: twice what the fastest link that we expect carries in 30 ms.
const AHEAD_BYTES: u64 = 8 << 20;
/// A source is asked ahead for no more bytes than it gives in this time, or for one piece: what a slow source
/// was asked for, no other brings.
const AHEAD: Duration = Duration::from_millis(500);
/// The most pieces that one source is asked for ahead: small ones are many.
const AHEAD_PIECES: usize = 1024;
/// The most pieces of one message; `content.proto` says so.
const MESSAGE_PIECES: usize = 256;
/// How many pieces ahead of the order a source is asked for pieces that others do not have.
const LOOK: usize = 1024;
/// The most pieces in memory on their way from the network to the disk, besides the one in hand.
const QUEUE: usize = 4;
/// A source that was asked and sends nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(20);
/// When nothing else is left to do: how long a device may take for a piece that the coordinator brings sooner.
const LATE: Duration = Duration::from_secs(2);
/// The time between two checks for silent sources.
const TICK: Duration = Duration::from_millis(500);
/// Pieces with a wrong digest from the coordinator before the fetch fails.
const WRONG: u32 = 3;

/// How far a placement is, for people.
#[derive(Default)]
pub(crate) struct Meter {
    /// Bytes that were fetched, with a right digest.
    pub(crate) fetched: AtomicU64,
    /// Bytes that are to be fetched in all.
    pub(crate) to_fetch: AtomicU64,
    /// Bytes that were fetched from other devices; also counted in `fetched`.
    pub(crate) from_peers: AtomicU64,
    /// Bytes that were read for the shard.
    pub(crate) read: AtomicU64,
    /// Bytes that are to be read for the shard in all.
    pub(crate) to_read: AtomicU64,
}

/// The coordinator and the devices that pieces may come from.
pub(crate) struct Sources {
    pub(crate) coordinator: ModelServer,
    pub(crate) peers: Vec<Neighbour>,
    pub(crate) identity: Identity,
    /// The local address for calls, if not any will do.
    pub(crate) from: Option<IpAddr>,
}

/// A source of pieces: the coordinator or a device.
struct Source {
    /// The device's name; none for the coordinator.
    name: Option<DeviceName>,
    wants: Option<mpsc::Sender<v1::Wants>>,
    /// The pieces that it was asked for and has not answered: when, and how many bytes were ahead then.
    asked: HashMap<u32, (Instant, u64)>,
    ahead: u64,
    /// Bytes that it gives in [`AHEAD`], by its last piece; 0 before the first.
    window: u64,
    /// The largest `window` so far.
    best: u64,
    /// A bit for each piece that it has; empty for the coordinator, which has all.
    has: Vec<u8>,
    heard: Instant,
}

impl Source {
    fn new(name: Option<DeviceName>, wants: Option<mpsc::Sender<v1::Wants>>) -> Self {
        let (asked, has) = (HashMap::new(), Vec::new());
        Self { name, wants, asked, ahead: 0, window: 0, best: 0, has, heard: Instant::now() }
    }
    fn has(&self, piece: u32) -> bool {
        self.name.is_none() || bit(&self.has, piece)
    }
    fn room(&self) -> bool {
        self.wants.as_ref().is_some_and(|wants| wants.capacity() > 0)
            && (self.asked.is_empty() || self.ahead < self.window.min(AHEAD_BYTES))
            && self.asked.len() < AHEAD_PIECES
    }
    /// Notes that the source was asked for a piece of so many bytes.
    fn ask(&mut self, piece: u32, bytes: u64) {
        let now = Instant::now();
        if self.asked.is_empty() {
            self.heard = now;
        }
        self.ahead += bytes;
        self.asked.insert(piece, (now, self.ahead));
    }
    /// Notes that the source has answered, and, if it gave the piece, how fast it is. False if it was not asked.
    fn answer(&mut self, piece: u32, bytes: u64, gave: bool) -> bool {
        let Some((asked, ahead)) = self.asked.remove(&piece) else { return false };
        self.ahead -= bytes;
        if gave {
            let took = asked.elapsed().as_micros().max(1);
            self.window = (u128::from(ahead) * AHEAD.as_micros() / took) as u64;
            self.best = self.best.max(self.window);
        }
        true
    }
    /// Whether a piece that it was asked for is late.
    fn late(&self) -> bool {
        self.asked.values().any(|(asked, _)| asked.elapsed() >= LATE)
    }
}

/// A result of the disk's threads.
enum Outcome {
    /// A piece that was there already was checked: whether its digest was right.
    Checked { piece: u32, right: bool },
    /// A piece that came was written.
    Written { source: usize, piece: u32 },
    /// A piece that came had a wrong digest.
    Wrong { source: usize, piece: u32 },
    /// The disk does not take a piece.
    Failed(io::Error),
}

struct Fetch<'a> {
    data: Arc<Data>,
    sources: Vec<Source>,
    /// Pieces that are wanted, absent and not asked for, in order.
    todo: VecDeque<u32>,
    /// Pieces that were counted as to be fetched.
    counted: Vec<bool>,
    /// The number of pieces that were asked for, or are with the disk.
    pending: u32,
    wrong: u32,
    meter: &'a Meter,
}

/// Fetches the pieces of `list`, in that order unless a reader waits for others, until all are here and `done` has
/// ended.
///
/// # Errors
/// When the coordinator is lost, or sends what is wrong, or the disk does not take what comes. Readers that wait for
/// pieces get the reason.
pub(crate) async fn fetch(
    data: Arc<Data>,
    list: Vec<u32>,
    sources: Sources,
    meter: &Meter,
    done: impl Future<Output = ()>,
) -> Result<(), ContentError> {
    let opened = data.begin();
    let Sources { coordinator: ModelServer { incoming, wants }, peers, identity, from } = sources;
    let mut fetch = Fetch {
        sources: vec![Source::new(None, Some(wants))],
        todo: VecDeque::new(),
        counted: vec![false; data.pieces.count() as usize],
        pending: 0,
        wrong: 0,
        meter,
        data: data.clone(),
    };
    let mut kept = Vec::new();
    for piece in list {
        match data.state(piece) {
            PieceState::Absent => fetch.want(piece, false),
            PieceState::Kept => {
                data.set(piece, PieceState::Coming);
                kept.push(piece);
            }
            PieceState::Coming | PieceState::Here => {}
        }
    }
    let mut tasks = JoinSet::new();
    let (results, mut disk) = mpsc::channel(16);
    let (news, mut said) = mpsc::channel(QUEUE);
    tasks.spawn(listen(0, incoming, news.clone()));
    if !fetch.todo.is_empty() || !kept.is_empty() {
        for (at, peer) in peers.into_iter().enumerate() {
            fetch.sources.push(Source::new(Some(peer.name.clone()), None));
            let about = (data.content, data.manifest.fingerprint().to_owned());
            tasks.spawn(join(at + 1, peer, (identity.clone(), from), about, news.clone()));
        }
    }
    let thread = |source| data.disk_error(source);
    let (keeping, keep) = keeper(data.clone());
    let kept_all = on_thread("keep", keep).map_err(thread)?;
    let (jobs, work) = mpsc::channel(QUEUE);
    let writing = (data.clone(), results.clone());
    on_thread("write", move || write(&writing.0, work, &keeping, &writing.1)).map_err(thread)?;
    fetch.check(kept, &mut tasks, &results);

    let result = {
        tokio::pin!(done);
        let mut finished = false;
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let (absent, kept) = data.take_wanted();
            // The piece that was waited for first comes first.
            absent.into_iter().rev().for_each(|piece| fetch.want(piece, true));
            fetch.check(kept, &mut tasks, &results);
            fetch.ask();
            if finished && fetch.todo.is_empty() && fetch.pending == 0 {
                break Ok(());
            }
            let step = tokio::select! {
                () = &mut done, if !finished => {
                    finished = true;
                    Ok(())
                }
                Some((source, news)) = said.recv(), if jobs.capacity() > 0 => {
                    fetch.hear(source, news, &jobs)
                }
                Some(result) = disk.recv() => fetch.take(result),
                () = data.asked.notified() => Ok(()),
                _ = ticks.tick() => fetch.silent(jobs.capacity() < QUEUE),
            };
            if let Err(error) = step {
                break Err(error);
            }
        }
    };
    // The writer ends, whatever it does, and then the keeper: what came is on the map before it counts as here for
    // good. And if the disk takes no more, it is the keeper that knows why.
    drop((jobs, disk));
    let kept = kept_all.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let result = kept.map_err(|source| data.disk_error(source)).and(result);
    // Just before the return: readers must not fail before the reason is known.
    match &result {
        Ok(()) => opened.close("all that was to be fetched is here"),
        Err(error) => opened.close(&error.to_string()),
    }
    result
}

impl Fetch<'_> {
    /// Puts a piece on the list, in front if a reader waits for it.
    fn want(&mut self, piece: u32, first: bool) {
        if !std::mem::replace(&mut self.counted[piece as usize], true) {
            let bytes = self.data.pieces.bytes(piece);
            self.meter.to_fetch.fetch_add(bytes, Ordering::Relaxed);
        }
        match first {
            true => self.todo.push_front(piece),
            false => self.todo.push_back(piece),
        }
    }

    /// Has pieces checked that are in the cache already.
    fn check(&mut self, kept: Vec<u32>, tasks: &mut JoinSet<()>, results: &mpsc::Sender<Outcome>) {
        if kept.is_empty() {
            return;
        }
        self.pending += kept.len() as u32;
        let (data, results) = (self.data.clone(), results.clone());
        tasks.spawn_blocking(move || {
            for piece in kept {
                let right = data.check(piece);
                if results.blocking_send(Outcome::Checked { piece, right }).is_err() {
                    return;
                }
            }
        });
    }

    /// Asks sources with room for pieces that they have, devices before the coordinator: its link is shared by all.
    fn ask(&mut self) {
        for at in (1..self.sources.len()).chain([0]) {
            let mut pieces = Vec::new();
            while self.sources[at].room() && pieces.len() < MESSAGE_PIECES {
                let source = &self.sources[at];
                let found = self.todo.iter().take(LOOK).position(|piece| source.has(*piece));
                let Some(piece) = found.and_then(|found| self.todo.remove(found)) else { break };
                // A piece may be listed twice, if a reader waited for it.
                if self.data.state(piece) != PieceState::Absent {
                    continue;
                }
                self.data.set(piece, PieceState::Coming);
                self.pending += 1;
                self.sources[at].ask(piece, self.data.pieces.bytes(piece));
                pieces.push(piece);
            }
            if let (Some(wants), false) = (&self.sources[at].wants, pieces.is_empty()) {
                // There is room, and a source that is gone says so itself.
                drop(wants.try_send(v1::Wants { pieces, ..v1::Wants::default() }));
            }
        }
    }

    /// Handles a message of a source.
    fn hear(
        &mut self,
        at: usize,
        news: News,
        jobs: &mpsc::Sender<(usize, u32, Payload)>,
    ) -> Result<(), ContentError> {
        let source = &mut self.sources[at];
        source.heard = Instant::now();
        match news {
            News::Joined(wants) => source.wants = Some(wants),
            News::Holding(bits) => source.has = bits,
            News::Gone(why) => return self.lose(at, &why),
            News::Piece(piece, bytes) => {
                // A message of a source that was given up counts no more.
                if source.wants.is_none() {
                    return Ok(());
                }
                let want = self.data.pieces.bytes(piece);
                if !source.answer(piece, want, bytes.len() as u64 == want) {
                    return self.lose(at, "it sends what it was not asked for");
                }
                if bytes.len() as u64 != want {
                    if let Some(byte) = source.has.get_mut((piece / 8) as usize) {
                        *byte &= !(1 << (piece % 8));
                    }
                    self.again(piece);
                    return match (at, bytes.len()) {
                        (0, have) => Err(ContentError::Lost {
                            why: format!("it sends {have} of {want} bytes of piece {piece}"),
                        }),
                        // The source had the piece, and has it no more.
                        (_, 0) => Ok(()),
                        _ => self.lose(at, "it sends pieces of a wrong length"),
                    };
                }
                // There is room: nothing is received where there is none.
                let gone = |_| self.data.disk_error(io::Error::other("no writer"));
                jobs.try_send((at, piece, bytes)).map_err(gone)?;
            }
        }
        Ok(())
    }

    /// Handles a result of the disk's threads.
    fn take(&mut self, result: Outcome) -> Result<(), ContentError> {
        match result {
            Outcome::Checked { right: true, .. } => self.pending -= 1,
            Outcome::Checked { piece, right: false } => {
                self.pending -= 1;
                tracing::warn!(piece, "a damaged piece in the cache is fetched again");
                self.want(piece, false);
            }
            Outcome::Written { source, piece } => {
                self.pending -= 1;
                let bytes = self.data.pieces.bytes(piece);
                self.meter.fetched.fetch_add(bytes, Ordering::Relaxed);
                if source > 0 {
                    self.meter.from_peers.fetch_add(bytes, Ordering::Relaxed);
                }
            }
            Outcome::Wrong { source, piece } => {
                self.again(piece);
                if source > 0 {
                    return self.lose(source, "it sends pieces with a wrong digest");
                }
                self.wrong += 1;
                if self.wrong >= WRONG {
                    return Err(ContentError::Wrong { piece });
                }
            }
            Outcome::Failed(source) => return Err(self.data.disk_error(source)),
        }
        Ok(())
    }

    /// Asks again for a piece that has not come.
    fn again(&mut self, piece: u32) {
        self.pending -= 1;
        self.data.set(piece, PieceState::Absent);
        self.want(piece, true);
    }

    /// Continues without a source; without the coordinator the fetch fails.
    fn lose(&mut self, at: usize, why: &str) -> Result<(), ContentError> {
        let source = &mut self.sources[at];
        source.wants = None;
        source.ahead = 0;
        source.has.clear();
        let asked: Vec<u32> = source.asked.drain().map(|(piece, _)| piece).collect();
        let Some(name) = &source.name else {
            return Err(ContentError::Lost { why: why.to_owned() });
        };
        tracing::info!(peer = %name, why, asked = asked.len(), "goes on without a device");
        asked.into_iter().for_each(|piece| self.again(piece));
        Ok(())
    }

    /// Continues without sources that are silent, and at the end without those for which all others wait. While the
    /// disk is `busy`, nothing is received from any.
    fn silent(&mut self, busy: bool) -> Result<(), ContentError> {
        let coordinator = &self.sources[0];
        let over = !busy && self.todo.is_empty() && coordinator.asked.is_empty();
        // A coordinator that was never asked may well be faster.
        let fast = if coordinator.best == 0 { u64::MAX } else { coordinator.best / 2 };
        for at in 0..self.sources.len() {
            let source = &mut self.sources[at];
            if busy {
                source.heard = Instant::now();
            }
            if !source.asked.is_empty() && source.heard.elapsed() >= SILENCE {
                self.lose(at, &format!("it has said nothing for {SILENCE:?}"))?;
            } else if over && source.late() && source.window < fast {
                self.lose(at, "the coordinator is faster")?;
            }
        }
        Ok(())
    }
}

/// Checks the digests of the pieces that come, and writes them.
fn write(
    data: &Data,
    mut jobs: mpsc::Receiver<(usize, u32, Payload)>,
    keeping: &std::sync::mpsc::SyncSender<u32>,
    results: &mpsc::Sender<Outcome>,
) {
    while let Some((source, piece, bytes)) = jobs.blocking_recv() {
        let result = match data.manifest.is(piece, &bytes) {
            false => Outcome::Wrong { source, piece },
            true => match data.write(piece, &bytes) {
                Ok(()) => {
                    // A keeper that ended reports its error when its result is taken.
                    match keeping.send(piece) {
                        Ok(()) => Outcome::Written { source, piece },
                        Err(_) => Outcome::Failed(io::Error::other("the disk keeps no more")),
                    }
                }
                Err(error) => Outcome::Failed(error),
            },
        };
        if results.blocking_send(result).is_err() {
            return;
        }
    }
}
