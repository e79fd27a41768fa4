//! The events of one simulation: requests at any time, and all faults that a cluster may have.

use crate::{
    network::{CLIENT, DESK, Network, Party},
    world::{BY_HAND, Keys, Setup, World},
};
use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use futures_util::future::join_all;
use galaxy_client::{Client, ClientError, GenerateOptions, Generated, Output, RetryPolicy};
use galaxy_common::{Cache, Sampling, Sequence};
use galaxy_engine::{generate::token, local::LocalCluster};
use galaxy_model::ModelDir;
use galaxy_testbed::{
    chaos,
    golden::{self, Expected, TOLERANCE, deviation},
};
use std::{
    collections::BTreeMap,
    fmt, fs,
    ops::ControlFlow,
    path::Path,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

/// The models, of each kind of block.
pub const MODELS: [&str; 8] = ["bert", "gpt2", "llama", "opt", "gptj", "qwen3", "mpnet", "roberta"];
const STRATEGIES: [&str; 5] = ["galaxy", "megatron", "sequence", "pipeline", "auto"];
/// The lengths of texts with known results, in tokens; most are short.
const LENGTHS: [u32; 6] = [1, 2, 7, 7, 64, 129];
/// The least and the most time that pieces may take on the network, in microseconds.
const DELAYS: [(u64, u64); 5] = [(0, 0), (0, 2_000), (0, 2_000), (1_000, 20_000), (0, 300_000)];
/// The time limits of requests, in ms.
const TIMES: [u64; 4] = [300, 3_000, 10_000, 30_000];
/// The time after a call's limit within which its caller must know the outcome.
const LATE: Duration = Duration::from_millis(200);
/// The further time for generations while others have the room in the cache: each waits up to 30 s for its
/// cluster.
const ROOM: Duration = Duration::from_secs(120);
/// The time within which the cluster must answer, once all faults are over.
const RECOVERY: Duration = Duration::from_secs(60);
/// The time within which parties must end after they were asked to.
const END: Duration = Duration::from_secs(30);
/// The time limit of a whole simulation.
const WHOLE: Duration = Duration::from_secs(400);
/// The error codes that show a bug of ours, and not a fault of devices, networks or requests.
const OURS: [&str; 6] =
    ["internal", "malformed_answer", "unknown", "invalid_argument", "unimplemented", "data_loss"];

/// The reference results of a model, as `transformers` computed them.
pub struct Reference {
    expected: Expected,
    /// The prompts of decoders, and the likeliest tokens behind each. Where a model has enough positions, the
    /// last is longer than a KV block.
    texts: Vec<(Vec<u32>, Vec<u32>)>,
}

/// The reference results, by model.
pub type References = Arc<BTreeMap<&'static str, Reference>>;

/// Reads the reference results of all models.
pub fn references() -> Result<References> {
    let read = |model| {
        let folder = golden::checkpoints_dir().join(model);
        let expected = Expected::read(&folder)?;
        let mut texts = match fs::read(folder.join("generated.json")) {
            Ok(text) => texts(&serde_json::from_slice(&text)?)?,
            Err(_) => Vec::new(),
        };
        if !texts.is_empty() {
            texts.extend(long_text(&folder)?);
        }
        anyhow::Ok((model, Reference { expected, texts }))
    };
    Ok(Arc::new(MODELS.into_iter().map(read).collect::<Result<_>>()?))
}

/// A prompt and tokens that cross the edge of a KV block, as one device alone generates them; none where a
/// model has too few positions.
fn long_text(folder: &Path) -> Result<Option<(Vec<u32>, Vec<u32>)>> {
    let model = Arc::new(ModelDir::open(folder)?);
    let (rows, prompt) = (Cache::BLOCK + 40, Cache::BLOCK as usize - 22);
    if model.spec().position_limit() < rows {
        return Ok(None);
    }
    let cluster = LocalCluster::open(model.clone(), chaos::plan(&model, 1)?)?;
    for seed in 0..20 {
        let tokens: Vec<u32> =
            (0..prompt as u32).map(|at| (at * at + 7 * at + seed) % 90).collect();
        let sampling = Sampling { logprobs: 2, ..Sampling::greedy() };
        let text = Sequence { slot: 0, rows, sampling, tokens: tokens.clone(), prompt };
        let (mut made, mut sure) = (Vec::new(), true);
        cluster.generate(&text, 62, 64, &[], &mut |told| {
            let token = token(told, String::new());
            // Several devices together may choose another of two tokens that are as likely.
            sure &= token.top[0].1 - token.top[1].1 > 0.01;
            made.push(token.token);
            ControlFlow::Continue(())
        })?;
        if sure {
            return Ok(Some((tokens, made)));
        }
    }
    bail!("{}: in every text two tokens are as likely", folder.display())
}

fn texts(golden: &serde_json::Value) -> Result<Vec<(Vec<u32>, Vec<u32>)>> {
    let list = |prompt: &serde_json::Value, key| {
        serde_json::from_value::<Vec<u32>>(prompt[key].clone()).context("a list of tokens")
    };
    let prompts = golden["prompts"].as_array().context("prompts")?;
    prompts.iter().map(|p| Ok((list(p, "prompt")?, list(p, "generated")?))).collect()
}

/// The counts of a simulation's requests, by what became of them.
#[derive(Default, Clone)]
pub struct Tally {
    pub answered: u64,
    /// The generations among them.
    pub texts: u64,
    pub abandoned: u64,
    /// The times that a device was brought pieces of the model for its place.
    pub brought: u64,
    /// The sequences that were evicted for an older one.
    pub evicted: u64,
    /// The most sequences that were in one step.
    pub most: usize,
    /// The errors, by their codes.
    pub errors: BTreeMap<String, u64>,
    /// The virtual time that the simulation lasted.
    pub lasted: Duration,
}

impl Tally {
    pub fn add(&mut self, other: &Self) {
        self.answered += other.answered;
        self.texts += other.texts;
        self.abandoned += other.abandoned;
        self.brought += other.brought;
        self.evicted += other.evicted;
        self.most = self.most.max(other.most);
        self.lasted += other.lasted;
        for (code, count) in &other.errors {
            *self.errors.entry(code.clone()).or_default() += count;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answered, texts, abandoned, brought, evicted, most, errors, lasted } = self;
        write!(
            f,
            "{answered} answered, {texts} of them texts, {abandoned} abandoned, {brought} times brought, \
             {evicted} times evicted, up to {most} in a step, in {:.0} s: ",
            lasted.as_secs_f64()
        )?;
        for (code, count) in errors {
            write!(f, "{code} {count}, ")?;
        }
        Ok(())
    }
}

/// The state that all tasks of a simulation share.
struct Story {
    begun: Instant,
    setup: Setup,
    references: References,
    tally: Mutex<Tally>,
    lines: Mutex<Vec<String>>,
}

impl Story {
    fn say(&self, line: impl fmt::Display) {
        let line = format!("{:9.3} {line}", self.begun.elapsed().as_secs_f64());
        if std::env::var_os("GALAXY_SIMULATION_LOG").is_some() {
            eprintln!("{line}");
        }
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }
    fn count(&self, with: impl FnOnce(&mut Tally)) {
        with(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Sends one request. Its result must be right; an error is returned.
    async fn ask(
        &self,
        client: &Client,
        lengths: &[u32],
        limit: Duration,
    ) -> Result<(), ClientError> {
        let expected = &self.references[self.setup.model].expected;
        let ids: Vec<_> = lengths.iter().map(|length| expected.ids(*length).unwrap()).collect();
        let client = client.with_timeout(limit);
        let tensors = in_time(limit, client.run(&ids, Output::Hidden)).await?.tensors;
        assert_eq!(tensors.len(), lengths.len());
        for (tensor, length) in tensors.iter().zip(lengths) {
            let off = deviation(&tensor.values, expected.values("hidden", *length).unwrap());
            let off = off.unwrap();
            assert!(off <= TOLERANCE, "{} rows: off by {off:e}", length);
        }
        Ok(())
    }

    fn reference_texts(&self) -> &[(Vec<u32>, Vec<u32>)] {
        &self.references[self.setup.model].texts
    }

    /// Generates `count` tokens, each of which must be right and in time. `begun` is called when the first is
    /// there.
    async fn text(
        &self,
        client: &Client,
        (which, count): (usize, usize),
        limit: Duration,
        begun: impl FnOnce(),
    ) -> Result<(), ClientError> {
        let (prompt, want) = &self.reference_texts()[which];
        let (mut begun, count) = (Some(begun), count.min(want.len()));
        let options = GenerateOptions {
            max_tokens: count as u32,
            ignore_end: true,
            ..GenerateOptions::default()
        };
        let client = client.with_timeout(limit);
        // It waits for as long as others have the room, or programs run.
        let patience = limit + ROOM;
        let beginning = client.generate(prompt.clone(), options);
        let mut text = in_time(patience, beginning).await?;
        let mut made = Vec::new();
        let finish = loop {
            match in_time(patience, text.next()).await? {
                Some(Generated::Token(token)) => {
                    made.push(token.token);
                    begun.take().into_iter().for_each(|begun| begun());
                }
                Some(Generated::Done(done)) => break done.finish,
                None => panic!("a text without an end"),
            }
        };
        assert_eq!((&made[..], finish.as_str()), (&want[..count], "length"));
        Ok(())
    }
}

/// The result of a call, which must come within `limit`.
async fn in_time<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    let asked = Instant::now();
    let result = call.await;
    let (took, why) = (asked.elapsed(), result.as_ref().err());
    assert!(took <= limit + LATE, "a call of {limit:?} took {took:?}: {why:?}");
    result
}

/// Plays one simulation.
///
/// # Errors
/// The failure, and all events before it.
pub async fn play(seed: u64, keys: Arc<Keys>, references: References) -> Result<Tally> {
    let mut dice = Rng::with_seed(seed);
    let devices = [1, 2, 2, 2, 3, 3, 3, 4][dice.usize(..8)];
    let mut setup = Setup {
        model: MODELS[dice.usize(..MODELS.len())],
        strategy: STRATEGIES[dice.usize(..STRATEGIES.len())],
        tiles: dice.u16(1..=5),
        shares: (0..devices).map(|_| f64::from(dice.u32(2..=6)) / 2.0).collect(),
        have: vec![true; devices],
        crowds: dice.bool(),
        // Few blocks: sequences that run together evict each other.
        blocks: dice.bool().then(|| dice.u32(2..=4)),
    };
    if dice.bool() {
        setup.have.fill_with(|| dice.bool());
    }
    let story = Arc::new(Story {
        begun: Instant::now(),
        setup: setup.clone(),
        references,
        tally: Mutex::default(),
        lines: Mutex::default(),
    });
    story.say(format_args!("seed {seed}: {setup:?}"));
    let told = async {
        let whole = timeout(WHOLE, tell(&story, &mut dice, keys, setup)).await;
        whole.context("it hangs")?
    };
    match told.await {
        Ok(()) => {
            story.count(|tally| tally.lasted = story.begun.elapsed());
            Ok(story.tally.lock().unwrap_or_else(PoisonError::into_inner).clone())
        }
        Err(error) => {
            let lines = story.lines.lock().unwrap_or_else(PoisonError::into_inner).join("\n");
            Err(error.context(lines))
        }
    }
}

async fn tell(story: &Arc<Story>, dice: &mut Rng, keys: Arc<Keys>, setup: Setup) -> Result<()> {
    let network = Network::new(dice.u64(..), DELAYS[dice.usize(..DELAYS.len())]);
    let mut world = World::new(keys, setup, network).await?;
    for party in 0..=world.devices() {
        // Some devices start late.
        if dice.u32(..5) > 0 {
            world.start(party).await?;
        }
    }
    let mut clients = JoinSet::new();
    for name in 0..dice.u32(1..=3) {
        let connected = connect(story, &mut world).await?;
        clients.spawn(customer(story.clone(), connected, name, Rng::with_seed(dice.u64(..))));
    }
    let until = Instant::now() + Duration::from_secs(dice.u64(3..=18));
    while Instant::now() < until {
        sleep(Duration::from_millis(dice.u64(100..=3_000))).await;
        strike(story, dice, &mut world).await?;
        while let Some(joined) = clients.try_join_next() {
            joined.context("a client")??;
        }
    }
    // All faults are over.
    clients.abort_all();
    while let Some(joined) = clients.join_next().await {
        match joined {
            Ok(done) => done?,
            Err(error) if error.is_cancelled() => {}
            Err(error) => bail!("a client: {error}"),
        }
    }
    story.say("all is mended");
    world.network.mend();
    world.network.delay((0, 2_000));
    timeout(END, world.gone()).await.context("a party that was told to end does not")?;
    for party in 0..=world.devices() {
        if !world.alive(party) {
            world.start(party).await?;
        }
    }
    let client = connect(story, &mut world).await?;
    recover(story, &client).await?;
    if !story.reference_texts().is_empty() && dice.bool() {
        let lasting = world.client_by(RECOVERY, RetryPolicy::default()).await?;
        outlive(story, &lasting, DESK, &mut world).await?;
        recover(story, &client).await?;
    }
    if world.devices() > 1 && !BY_HAND.contains(&story.setup.strategy) && dice.bool() {
        // One device goes for good, and the others go on without it. Or not for good.
        let device = dice.usize(1..=world.devices());
        if story.reference_texts().is_empty() {
            story.say(format_args!("{device} dies"));
            world.end(device, false);
            recover(story, &client).await?;
        } else {
            outlive(story, &client, device, &mut world).await?;
        }
        story.say(format_args!("{device} is started again"));
        timeout(END, world.gone()).await.context("a party that was told to end does not")?;
        world.start(device).await?;
        sleep(Duration::from_millis(dice.u64(0..=20_000))).await;
        recover(story, &client).await?;
    }
    drop(client);
    timeout(END, world.close()).await.context("the parties do not end")?;
    story.count(|tally| {
        tally.brought = world.brought.load(Ordering::Relaxed);
        (tally.evicted, tally.most) = world.crowds;
    });
    Ok(())
}

/// Lets a device, or the coordinator, which is started again, die in the middle of a generation, which goes
/// on.
async fn outlive(story: &Story, client: &Client, party: Party, world: &mut World) -> Result<()> {
    for _ in 0..5 {
        let (begun, has_begun) = oneshot::channel();
        let text = story.text(client, (0, 64), RECOVERY, || begun.send(()).unwrap());
        let death = async {
            let begun = has_begun.await.is_ok();
            if begun {
                story.say(format_args!("{party} dies in the middle of a text"));
                world.end(party, false);
                if party == DESK {
                    timeout(END, world.gone()).await.context("the coordinator does not end")?;
                    world.start(DESK).await?;
                }
            }
            anyhow::Ok(begun)
        };
        match tokio::join!(text, death) {
            (text, Ok(true)) => {
                text.context("a text ends with a party that dies")?;
                story.say("the text is whole");
                return Ok(());
            }
            // A fault of before may be noticed only now.
            (_, Err(error)) => return Err(error),
            (text, Ok(false)) => story.say(format_args!("no text yet: {:?}", text.err())),
        }
        recover(story, client).await?;
    }
    bail!("no text begins")
}

/// Asks until there is an answer, which must come.
async fn recover(story: &Story, client: &Client) -> Result<()> {
    let mended = Instant::now();
    while let Err(error) = story.ask(client, &[7, 2], Duration::from_secs(20)).await {
        story.say(format_args!("not yet: {error}"));
        ensure!(mended.elapsed() < RECOVERY, "no answer within {RECOVERY:?}: {error}");
        sleep(Duration::from_millis(300)).await;
    }
    story.say("answers again");
    Ok(())
}

/// Connects a client for the first time; starts the coordinator if there is none.
async fn connect(story: &Story, world: &mut World) -> Result<Client> {
    for _ in 0..20 {
        if !world.alive(DESK) {
            world.start(DESK).await?;
        }
        match world.client(Duration::from_secs(10)).await {
            Ok(client) => return Ok(client),
            Err(error) => story.say(format_args!("no connection: {error}")),
        }
    }
    bail!("a client cannot connect")
}

/// Sends one request after another, as a client.
async fn customer(story: Arc<Story>, client: Client, name: u32, mut dice: Rng) -> Result<()> {
    for request in 0.. {
        sleep(Duration::from_millis(dice.u64(0..=2_000))).await;
        let lengths: Vec<u32> =
            (0..dice.usize(1..=3)).map(|_| LENGTHS[dice.usize(..LENGTHS.len())]).collect();
        let limit = Duration::from_millis(TIMES[dice.usize(..TIMES.len())]);
        let texts = story.reference_texts().len();
        let text = texts > 0 && dice.u32(..3) == 0;
        let crowd = if story.setup.crowds { dice.u64(1..=6) } else { 1 };
        let mut one = || (dice.usize(..texts.max(1)), [3, 20, 64][dice.usize(..3)]);
        let these: Vec<_> = (0..crowd).map(|_| one()).collect();
        let asked = async {
            match text {
                true => {
                    let all = these.iter().map(|of| story.text(&client, *of, limit, || ()));
                    join_all(all).await.into_iter().collect()
                }
                false => story.ask(&client, &lengths, limit).await,
            }
        };
        let answer = match dice.u32(..8) {
            0 => match timeout(Duration::from_millis(dice.u64(..500)), asked).await {
                Ok(answer) => answer,
                Err(_) => {
                    story.say(format_args!("client {name}, request {request}: left"));
                    story.count(|tally| tally.abandoned += 1);
                    continue;
                }
            },
            _ => asked.await,
        };
        match answer {
            Ok(()) => {
                let what = if text { format!("texts {these:?}") } else { format!("{lengths:?}") };
                story.say(format_args!("client {name}, request {request}: {what} right"));
                story.count(|tally| {
                    tally.answered += if text { crowd } else { 1 };
                    tally.texts += if text { crowd } else { 0 };
                });
            }
            Err(error) => {
                let code = error.code().to_owned();
                story.say(format_args!("client {name}, request {request}: {code}: {error}"));
                ensure!(
                    !OURS.contains(&code.as_str()),
                    "client {name}, request {request}: {error:?}"
                );
                story.count(|tally| *tally.errors.entry(code).or_default() += 1);
            }
        }
    }
    Ok(())
}

/// Lets one random event happen: a fault, or a mend.
async fn strike(story: &Story, dice: &mut Rng, world: &mut World) -> Result<()> {
    let devices = world.devices();
    let parties: Vec<Party> = (0..=devices).chain([CLIENT]).collect();
    let mut two = || {
        let one = parties[dice.usize(..parties.len())];
        let other = loop {
            let other = parties[dice.usize(..parties.len())];
            // Clients and devices do not connect to each other.
            if other != one && (one.min(other) == DESK || one.max(other) != CLIENT) {
                break other;
            }
        };
        (one, other)
    };
    let (one, other) = two();
    match dice.u32(..12) {
        0..3 => {
            story.say(format_args!("nothing passes from {one} to {other}"));
            world.network.cut(one, other, true);
            if dice.bool() {
                world.network.cut(other, one, true);
            }
        }
        3 => {
            story.say(format_args!("{one} is cut off"));
            for party in parties {
                world.network.cut(one, party, true);
                world.network.cut(party, one, true);
            }
        }
        4 => {
            story.say(format_args!("connections of {one} and {other} break"));
            world.network.tear(one, other);
        }
        5 => {
            let delay = DELAYS[dice.usize(..DELAYS.len())];
            story.say(format_args!("pieces take {delay:?} \u{b5}s"));
            world.network.delay(delay);
        }
        6..9 => {
            let party = dice.usize(0..=devices);
            if world.alive(party) {
                let gently = dice.bool();
                let how = if gently { "is ended" } else { "dies" };
                story.say(format_args!("{party} {how}"));
                world.end(party, gently);
            }
        }
        _ => {
            story.say("what is broken is mended");
            world.network.mend();
        }
    }
    for party in 0..=devices {
        if !world.alive(party) && dice.u32(..3) > 0 {
            timeout(END, world.gone()).await.context("a party that was told to end does not")?;
            let forgets = party != DESK && !story.setup.have[party - 1] && dice.bool();
            if forgets {
                world.forget(party)?;
            }
            let how = if forgets { ", with an empty disk" } else { "" };
            story.say(format_args!("{party} is started again{how}"));
            world.start(party).await?;
        }
    }
    Ok(())
}
