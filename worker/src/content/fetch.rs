//! Fetching: pieces that are wanted come from whoever has them, several requests ahead, and each is
//! looked at before it counts.
//!
//! One task decides. It never touches the disk: pieces go to a writer, which finds their digests and
//! writes them, and from there to a keeper, which has the disk hold them. Pieces that are in the cache
//! already are looked at meanwhile.

use super::{
    ContentError,
    data::{Data, State, bit, keeper},
    links::{Neighbour, News, Supply, join, listen},
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

/// Bytes that one source is asked for ahead: twice what the fastest link of ours carries in 30 ms,
const AHEAD_BYTES: u64 = 8 << 20;
/// and never more than it gave in this time, or one piece: what a slow one was asked for, no other brings.
const AHEAD: Duration = Duration::from_millis(500);
/// And pieces: small ones are many.
const AHEAD_PIECES: usize = 1024;
/// Pieces of one message; `content.proto` says so.
const MESSAGE_PIECES: usize = 256;
/// How far ahead of the order a source is given what others do not have.
const LOOK: usize = 1024;
/// Pieces in memory on their way from the network to the disk, besides the one in hand.
const QUEUE: usize = 4;
/// A source that was asked and says nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(20);
/// When nothing else is left to do: how long a device may take for a piece that the coordinator brings sooner.
const LATE: Duration = Duration::from_secs(2);
/// Between two looks at who is silent.
const TICK: Duration = Duration::from_millis(500);
/// Pieces with a wrong digest from the coordinator, before we believe it.
const WRONG: u32 = 3;

/// How far a placement is, for people.
#[derive(Default)]
pub(crate) struct Meter {
    /// Bytes that have come and were right,
    pub(crate) fetched: AtomicU64,
    /// of so many.
    pub(crate) to_fetch: AtomicU64,
    /// Of what came: from other devices.
    pub(crate) from_peers: AtomicU64,
    /// Bytes that were read for the shard,
    pub(crate) read: AtomicU64,
    /// of so many.
    pub(crate) to_read: AtomicU64,
}

/// Where pieces may come from.
pub(crate) struct Sources {
    pub(crate) coordinator: Supply,
    pub(crate) peers: Vec<Neighbour>,
    pub(crate) identity: Identity,
    /// Our address for calls, if not any will do.
    pub(crate) from: Option<IpAddr>,
}

/// One source.
struct Source {
    /// None: the coordinator.
    name: Option<DeviceName>,
    wants: Option<mpsc::Sender<v1::Wants>>,
    /// What it was asked for and has not answered: when, and how much that was ahead.
    asked: HashMap<u32, (Instant, u64)>,
    ahead: u64,
    /// Bytes that it gives in [`AHEAD`], by its last piece; 0 before the first.
    window: u64,
    /// And by the best one.
    best: u64,
    /// Which pieces it has; of the coordinator nothing: it has all.
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
    /// Notes that it was asked for a piece of so many bytes.
    fn ask(&mut self, piece: u32, bytes: u64) {
        let now = Instant::now();
        if self.asked.is_empty() {
            self.heard = now;
        }
        self.ahead += bytes;
        self.asked.insert(piece, (now, self.ahead));
    }
    /// Notes that it has answered, and if it gave the piece how fast it is. False: it was not asked.
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
    /// Whether something that it was asked for is long in coming.
    fn late(&self) -> bool {
        self.asked.values().any(|(asked, _)| asked.elapsed() >= LATE)
    }
}

/// What the disk says.
enum Outcome {
    /// A piece was there already: whether it was right.
    Checked { piece: u32, right: bool },
    /// A piece that came is here.
    Written { source: usize, piece: u32 },
    /// A piece that came was not what it should be.
    Wrong { source: usize, piece: u32 },
    /// The disk does not take it.
    Failed(io::Error),
}

struct Fetch<'a> {
    data: Arc<Data>,
    sources: Vec<Source>,
    /// Wanted, absent and not asked for, in order.
    todo: VecDeque<u32>,
    /// Pieces that were counted as to be fetched.
    counted: Vec<bool>,
    /// Pieces that were asked for, or are with the disk.
    pending: u32,
    wrong: u32,
    meter: &'a Meter,
}

/// Fetches the pieces of `list`, in that order where nobody waits for others, until all are here and
/// `done` is.
///
/// # Errors
/// When the coordinator is lost, or sends what is wrong, or the disk does not take what comes. Whoever
/// waits for pieces is told.
pub(crate) async fn fetch(
    data: Arc<Data>,
    list: Vec<u32>,
    sources: Sources,
    meter: &Meter,
    done: impl Future<Output = ()>,
) -> Result<(), ContentError> {
    let opened = data.begin();
    let Sources { coordinator: Supply { incoming, wants }, peers, identity, from } = sources;
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
            State::Absent => fetch.want(piece, false),
            State::Kept => {
                data.set(piece, State::Coming);
                kept.push(piece);
            }
            State::Coming | State::Here => {}
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
    let thread = |source| ContentError::disk(&data, source);
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
            // The first that is waited for comes first.
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
    // The writer ends, whatever it does, and then the keeper: what came is on the map before anybody
    // says that it is here for good. And if the disk keeps no more, it is the keeper that knows why.
    drop((jobs, disk));
    let kept = kept_all.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let result = kept.map_err(|source| ContentError::disk(&data, source)).and(result);
    // Right before it is returned: whoever waits for pieces must not fail before it is known why.
    match &result {
        Ok(()) => opened.close("all that was to be fetched is here"),
        Err(error) => opened.close(&error.to_string()),
    }
    result
}

impl Fetch<'_> {
    /// Puts a piece on the list, in front if somebody waits for it.
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

    /// Has pieces looked at that the cache has already.
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

    /// Asks whoever has room for what it has, devices before the coordinator: its link is shared by
    /// all.
    fn ask(&mut self) {
        for at in (1..self.sources.len()).chain([0]) {
            let mut pieces = Vec::new();
            while self.sources[at].room() && pieces.len() < MESSAGE_PIECES {
                let source = &self.sources[at];
                let found = self.todo.iter().take(LOOK).position(|piece| source.has(*piece));
                let Some(piece) = found.and_then(|found| self.todo.remove(found)) else { break };
                // It may stand here twice, if somebody waited for it.
                if self.data.state(piece) != State::Absent {
                    continue;
                }
                self.data.set(piece, State::Coming);
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

    /// Takes in what a source says.
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
                // What comes of a source that was given up counts no more.
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
                        // It had it, and has it no more.
                        (_, 0) => Ok(()),
                        _ => self.lose(at, "it sends pieces of a wrong length"),
                    };
                }
                // There is room: nothing is heard where there is none.
                let gone = |_| ContentError::disk(&self.data, io::Error::other("no writer"));
                jobs.try_send((at, piece, bytes)).map_err(gone)?;
            }
        }
        Ok(())
    }

    /// Takes in what the disk says.
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
            Outcome::Failed(source) => return Err(ContentError::disk(&self.data, source)),
        }
        Ok(())
    }

    /// A piece has not come, and has to be asked for again.
    fn again(&mut self, piece: u32) {
        self.pending -= 1;
        self.data.set(piece, State::Absent);
        self.want(piece, true);
    }

    /// Goes on without a source; without the coordinator it does not go on.
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

    /// Goes on without those that are silent, and at the end without those for which all others wait. While
    /// the disk is `busy`, nobody is listened to.
    fn silent(&mut self, busy: bool) -> Result<(), ContentError> {
        let coordinator = &self.sources[0];
        let over = !busy && self.todo.is_empty() && coordinator.asked.is_empty();
        // One that was never asked may well be faster.
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

/// Looks at what comes, and writes it.
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
                    // A keeper that ended has said why, when it is asked for.
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
