//! The cluster file: read once, checked, and never looked at again.

mod devices;
mod table;

pub use devices::{DIRECTORY, DeviceConfig, remove, write};
pub use table::KeyLocation;

use crate::client_memory::DEFAULT_CLIENT_MEMORY;
use devices::{devices, is_address};
use galaxy_common::{
    Activations, Bytes, CacheType, DeviceName, Reading,
    plan::{LinkType, MAX_DEVICES, MAX_TILES, Strategy, WireType},
    shape::MAX_ROWS,
};
use galaxy_model::{ModelDir, ModelError, Quantisation};
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};
use table::{Section, line_of};
use toml::de::{DeTable, DeValue};

/// The cluster file, in the current directory, that commands take if none is named.
pub const DEFAULT_FILE: &str = "cluster.toml";
/// Where the API listens by default: on this machine only.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:7000";
/// The most rows of one program by default: what a sentence model's batch of 32 short texts has.
pub const DEFAULT_MAX_ROWS: u32 = 512;
/// How many requests may wait by default.
pub const DEFAULT_QUEUE: usize = 64;
/// How long a request may take if neither it nor the cluster file says.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Tiles of a split by hand by default: the paper's ring steps, cut so that transfers hide.
pub const DEFAULT_TILES: u16 = 4;
/// The value of `link` by which the link type is the one that is measured to be best.
const AUTO: &str = "auto";
/// Rows of the KV cache by default, at most as many as the model has positions: a long page.
pub const DEFAULT_CACHE_ROWS: u32 = 2048;
/// Tokens that are generated behind a typical prompt by default: a paragraph.
pub const DEFAULT_GENERATE: u32 = 128;
/// The most rows of the KV cache that a file may ask for.
const MAX_CACHE_ROWS: u32 = 1 << 24;
/// Tokens of a typical text by default: a paragraph.
pub const DEFAULT_LENGTH: u32 = 128;
/// The most bytes of a file that is read: [`MAX_DEVICES`] devices take some ten KB. Of keys like
/// `a.b.c` the parser makes a table for each dot, a KB for each byte.
const MAX_BYTES: u64 = 256 << 10;
/// The most lengths that a workload may name: each is simulated for each plan.
const MAX_LENGTHS: usize = 16;
/// The most texts that a request may be planned to have.
pub const MAX_TEXTS: u32 = 65_536;
/// The directory of profiles by default, beside the cluster file.
pub const DEFAULT_PROFILES: &str = "profiles";
/// The share by which a device may run outside its profile by default: temperature and neighbours cause less.
pub const DEFAULT_DRIFT: f64 = 0.25;
/// How long a lost device is waited for by default: a worker that is started again is back sooner,
/// and a machine is not.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(5);

const CLUSTER_KEYS: &[&str] = &[
    "name",
    "model",
    "identity",
    "authority",
    "strategy",
    "wire",
    "activations",
    "tiles",
    "listen",
    "max_rows",
    "queue",
    "client_memory",
    "speculation",
    "link",
    "plain",
    "timeout",
    "lengths",
    "texts",
    "lossy",
    "profiles",
    "drift",
    "patience",
    "kv_cache_format",
    "kv_cache_tokens",
    "generate",
    "weight_streaming",
    "weights_format",
];
/// Former names of keys, which are taken with a warning.
const RENAMED: &[(&str, &str)] = &[
    ("cache", "kv_cache_format"),
    ("cache_rows", "kv_cache_tokens"),
    ("weights", "weight_streaming"),
];
const TOP_KEYS: &[&str] = &["cluster", "device"];

/// A cluster, as its file describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// The cluster's name, for people.
    pub name: String,
    /// The model's directory.
    pub model: PathBuf,
    /// The directory of the coordinator's identity.
    pub identity: PathBuf,
    /// The directory of the cluster's authority, if machines may join by invitations.
    pub authority: Option<PathBuf>,
    /// How work is split over the devices.
    pub strategy: Strategy,
    /// The number type of activations on links; none if the file does not say.
    pub wire: Option<WireType>,
    /// The format to which rows are rounded that are multiplied with weights in blocks of few bits.
    pub activations: Activations,
    /// The number of tiles; none if the file does not say.
    pub tiles: Option<u16>,
    /// Where the API listens.
    pub listen: String,
    /// The most rows of one program.
    pub max_rows: u32,
    /// The most requests that wait.
    pub queue: usize,
    /// How much of the coordinator's memory the requests of one client may hold.
    pub client_memory: Bytes,
    /// Whether drafts are verified where that pays (speculative decoding).
    pub speculation: bool,
    /// The type of ring links; none with `link = "auto"`, by which the best is measured.
    pub link: Option<LinkType>,
    /// Whether ring links may go without TLS.
    pub plain: bool,
    /// Whether the planner may choose number types for the wire that lose digits.
    pub lossy: bool,
    /// Lengths of typical texts in tokens, all equally likely.
    pub lengths: Vec<u32>,
    /// How many texts a typical request has.
    pub texts: u32,
    /// The directory of profiles.
    pub profiles: PathBuf,
    /// The share by which a device may run outside its profile before the split is looked at again.
    pub drift: f64,
    /// How long a device that is lost is waited for before the others go on without it.
    pub patience: Duration,
    /// Rows of the KV cache, for all sequences together; none if the model's positions say how many.
    pub kv_cache_tokens: Option<u32>,
    /// How keys and values are stored in the KV cache.
    pub kv_cache_format: CacheType,
    /// Tokens that are generated behind a typical prompt; none if the file does not say.
    pub generate: Option<u32>,
    /// How devices read weights that they cannot hold, if they may.
    pub weight_streaming: Reading,
    /// The format to which the matrices of the model are rounded; none if they are not.
    pub weights_format: Option<Quantisation>,
    /// How long a request may take that does not say itself.
    pub timeout: Duration,
    /// The devices; of a split by hand, in ring order.
    pub devices: Vec<DeviceConfig>,
    /// What is taken and should be written otherwise, for people.
    pub warnings: Vec<String>,
}

impl Cluster {
    /// Whether the file itself says how work is split, by shares. Without shares, profiles decide.
    pub fn by_hand(&self) -> bool {
        self.devices.iter().any(|device| device.share.is_some())
    }

    /// Opens the model, with matrices rounded as the file says, for devices that round rows as its `activations` say.
    ///
    /// # Errors
    /// When it cannot be read, or not be rounded, or the activations do not go with it.
    pub fn open_model(&self) -> Result<ModelDir, ModelError> {
        let model = ModelDir::open(&self.model)?.quantised_to(self.weights_format)?;
        model.with_activations(self.activations)
    }

    /// The number types for the wire that a plan may use, the preferred one first.
    pub fn wires(&self) -> Vec<WireType> {
        match self.wire {
            Some(wire) => vec![wire],
            None if self.lossy => vec![WireType::F32, WireType::F16],
            None => vec![WireType::F32],
        }
    }

    /// The link types that a plan may use: one without TLS only if the file allows it.
    pub fn links(&self) -> Vec<LinkType> {
        let may = |link: &LinkType| match self.link {
            Some(only) if only == *link => true,
            None if *link != LinkType::Plain => true,
            _ => self.plain && *link == LinkType::Plain,
        };
        LinkType::ALL.into_iter().filter(may).collect()
    }
}

/// What is wrong with a cluster file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// A file cannot be read.
    #[error("{path} cannot be read: {why}")]
    Read {
        /// The file that cannot be read.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// The file of a device that has joined is wrong.
    #[error("{path}: {source}")]
    OfDevice {
        /// The file of the device.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<ClusterError>,
    },
    /// The text is not TOML.
    #[error("line {line}: {why}")]
    Syntax {
        /// The line of the mistake, counted from 1.
        line: usize,
        /// What the parser said.
        why: String,
    },
    /// A key that is not known.
    #[error("{at} is not a key{}; known are {}", suggestion.map(|s| format!(": did you mean {s:?}?")).unwrap_or_default(), known.join(", "))]
    UnknownKey {
        /// The key, and its line.
        at: KeyLocation,
        /// The key that was probably meant, if one is near.
        suggestion: Option<&'static str>,
        /// The keys that are known in that table.
        known: &'static [&'static str],
    },
    /// A key that must be there is missing.
    #[error("line {line}: [{table}] has no {key:?}")]
    Missing {
        /// The table that lacks the key.
        table: String,
        /// The key that is missing.
        key: &'static str,
        /// The line where the table begins.
        line: usize,
    },
    /// A value of the wrong type.
    #[error("{at} must be {wanted}")]
    WrongType {
        /// The key of the value, and its line.
        at: KeyLocation,
        /// What the value must be.
        wanted: &'static str,
    },
    /// A value that is no list of whole numbers, or an empty or too long one.
    #[error("{at} must be a list of 1 to {most} whole numbers, like [128, 284]")]
    List {
        /// The key of the list, and its line.
        at: KeyLocation,
        /// The most numbers that the list may have.
        most: usize,
    },
    /// A number out of its range.
    #[error("{at} = {value} is out of range: {low} to {high}")]
    Range {
        /// The key of the number, and its line.
        at: KeyLocation,
        /// The number, as the file has it.
        value: String,
        /// The smallest number that is allowed.
        low: u32,
        /// The largest number that is allowed.
        high: u32,
    },
    /// A text that cannot be read as what it stands for.
    #[error("{at}: {why}")]
    Value {
        /// The key of the text, and its line.
        at: KeyLocation,
        /// What is wrong with it.
        why: String,
    },
    /// A share that is no weight.
    #[error("{at} = {share} is no weight: give a number above zero, like 2.0")]
    Share {
        /// The key of the share, and its line.
        at: KeyLocation,
        /// The share that was given.
        share: f64,
    },
    /// Shares, which split by hand, beside a strategy that splits by profiles.
    #[error(
        "{at}: strategy {strategy} splits by profiles, and shares split by hand: leave the shares out, or choose one of local, megatron, galaxy as the strategy"
    )]
    SharesWithoutUse {
        /// Where the first share stands.
        at: KeyLocation,
        /// The strategy, which splits by profiles.
        strategy: Strategy,
    },
    /// An address without a port.
    #[error("{at}: {address:?} is not an address: write host:port, like \"192.168.1.20:7100\"")]
    Address {
        /// The key of the address, and its line.
        at: KeyLocation,
        /// What was given as an address.
        address: String,
    },
    /// Two devices have the same name.
    #[error("{at}: the name {name} is used twice (first on line {first})")]
    NameTwice {
        /// The key of the second device's name, and its line.
        at: KeyLocation,
        /// The name that both have.
        name: DeviceName,
        /// The line of the first device's name.
        first: usize,
    },
    /// Two devices have the same address.
    #[error("{at}: the address {address} is used twice: {other} has it too (line {first})")]
    AddressTwice {
        /// The key of the second device's address, and its line.
        at: KeyLocation,
        /// The address that both have.
        address: String,
        /// The first device that has the address.
        other: DeviceName,
        /// The line of the first device's address.
        first: usize,
    },
    /// A device at an address that only its own machine can reach.
    #[error(
        "{at}: device {device} is at {address}, which {other} cannot reach: give its address on the network, like \"192.168.1.20:7100\""
    )]
    Loopback {
        /// The key of the address, and its line.
        at: KeyLocation,
        /// The device that others cannot reach.
        device: DeviceName,
        /// The address, which only the device's own machine can reach.
        address: String,
        /// A device on another machine.
        other: DeviceName,
    },
    /// No devices, or too many.
    #[error(
        "a cluster has 1 to {MAX_DEVICES} [[device]] tables, or files in devices.d, and this has {devices}"
    )]
    Devices {
        /// How many devices there are.
        devices: usize,
    },
}

impl Cluster {
    /// Reads and checks a cluster file, and the devices that have joined: those of the directory `devices.d` beside
    /// it. Paths in it count from its directory.
    ///
    /// # Errors
    /// The first thing that is wrong, with key and line.
    pub fn open(path: &Path) -> Result<Self, ClusterError> {
        let base = path.parent().unwrap_or(Path::new(""));
        let mut cluster = Self::read(&contents(path)?, base)?;
        for device in devices::of_directory(&base.join(DIRECTORY))? {
            if !cluster.devices.iter().any(|listed| listed.name == device.name) {
                cluster.devices.push(device);
            }
        }
        cluster.counted()
    }

    /// Checks the text of a cluster file that lies in `base`.
    ///
    /// # Errors
    /// As [`Cluster::open`].
    pub fn parse(text: &str, base: &Path) -> Result<Self, ClusterError> {
        Self::read(text, base)?.counted()
    }

    /// Checks that the cluster has devices, or that some can join, and that they are not too many.
    fn counted(self) -> Result<Self, ClusterError> {
        match self.devices.len() {
            0 if self.authority.is_some() => Ok(self),
            1..=MAX_DEVICES => Ok(self),
            devices => Err(ClusterError::Devices { devices }),
        }
    }

    fn read(text: &str, base: &Path) -> Result<Self, ClusterError> {
        let document = DeTable::parse(text).map_err(|e| ClusterError::Syntax {
            line: e.span().map_or(1, |s| line_of(text, s.start)),
            why: e.message().to_owned(),
        })?;
        let top = document.get_ref();
        Section::new(text, "file".into(), 1, top, (TOP_KEYS, &[]))?;
        let mut sections = Vec::new();
        let mut cluster = None;
        for (key, value) in top {
            let line = line_of(text, key.span().start);
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("cluster", DeValue::Table(table)) => {
                    let keys = (CLUSTER_KEYS, RENAMED);
                    cluster = Some(Section::new(text, "cluster".into(), line, table, keys)?);
                }
                ("device", DeValue::Array(tables)) => {
                    // Before each is looked at: finding its line takes a look at all before it.
                    if tables.len() > MAX_DEVICES {
                        return Err(ClusterError::Devices { devices: tables.len() });
                    }
                    for (i, item) in tables.iter().enumerate() {
                        let name = format!("device {}", i + 1);
                        let line = line_of(text, item.span().start);
                        let DeValue::Table(table) = item.get_ref() else {
                            let at = KeyLocation { key: name, line };
                            return Err(ClusterError::WrongType { at, wanted: "a table" });
                        };
                        sections.push(Section::new(text, name, line, table, (devices::KEYS, &[]))?);
                    }
                }
                (key, _) => {
                    let wanted =
                        if key == "device" { "[[device]] tables" } else { "a [cluster] table" };
                    return Err(ClusterError::WrongType {
                        at: KeyLocation { key: key.into(), line },
                        wanted,
                    });
                }
            }
        }
        let missing = || ClusterError::Missing { table: "file".into(), key: "[cluster]", line: 1 };
        let cluster = cluster.ok_or_else(missing)?;
        let devices = devices(&sections)?;
        let listen = cluster.text("listen")?.unwrap_or(DEFAULT_LISTEN).to_owned();
        if !is_address(&listen) {
            return Err(ClusterError::Address { at: cluster.place("listen"), address: listen });
        }
        let strategy = cluster.parsed("strategy")?.unwrap_or(Strategy::Auto);
        check_shares(strategy, &devices, &sections)?;
        let max_rows = cluster.whole("max_rows", 1, MAX_ROWS)?.unwrap_or(DEFAULT_MAX_ROWS);
        let drift = cluster.number("drift")?.unwrap_or(DEFAULT_DRIFT);
        // Below, noise of every day moves weights about.
        if !(0.05..=100.0).contains(&drift) {
            let why = format!("{drift} is no margin: give a share from 0.05 to 100, like 0.25");
            return Err(ClusterError::Value { at: cluster.place("drift"), why });
        }
        let lengths = cluster.wholes("lengths", 1, max_rows, MAX_LENGTHS)?;
        Ok(Self {
            name: cluster.text("name")?.unwrap_or("galaxy").to_owned(),
            model: base.join(cluster.required("model", cluster.text("model")?)?),
            identity: base.join(cluster.required("identity", cluster.text("identity")?)?),
            authority: cluster.text("authority")?.map(|path| base.join(path)),
            strategy,
            wire: cluster.parsed("wire")?,
            activations: cluster.parsed("activations")?.unwrap_or_default(),
            tiles: cluster.whole("tiles", 1, u32::from(MAX_TILES))?.map(|t| t as u16),
            listen,
            max_rows,
            queue: cluster.whole("queue", 1, 65_536)?.map_or(DEFAULT_QUEUE, |q| q as usize),
            client_memory: cluster.parsed("client_memory")?.unwrap_or(DEFAULT_CLIENT_MEMORY),
            speculation: cluster.switch("speculation")?.unwrap_or(true),
            link: match cluster.text("link")? {
                Some(AUTO) => None,
                _ => Some(cluster.parsed("link")?.unwrap_or(LinkType::Tls)),
            },
            plain: cluster.switch("plain")?.unwrap_or(false),
            lossy: cluster.switch("lossy")?.unwrap_or(false),
            lengths: lengths.unwrap_or_else(|| vec![DEFAULT_LENGTH.min(max_rows)]),
            texts: cluster.whole("texts", 1, MAX_TEXTS)?.unwrap_or(1),
            profiles: base.join(cluster.text("profiles")?.unwrap_or(DEFAULT_PROFILES)),
            drift,
            patience: cluster.duration("patience")?.unwrap_or(DEFAULT_PATIENCE),
            kv_cache_tokens: cluster.whole("kv_cache_tokens", 0, MAX_CACHE_ROWS)?,
            generate: cluster.whole("generate", 0, MAX_CACHE_ROWS)?,
            kv_cache_format: cluster.parsed("kv_cache_format")?.unwrap_or(CacheType::F32),
            weight_streaming: cluster.parsed("weight_streaming")?.unwrap_or_default(),
            weights_format: cluster.parsed("weights_format")?,
            timeout: cluster.duration("timeout")?.unwrap_or(DEFAULT_TIMEOUT),
            devices,
            warnings: cluster.warnings(),
        })
    }
}

/// Reads the text of a file, if it is not too long.
fn contents(path: &Path) -> Result<String, ClusterError> {
    let unreadable = |why: String| ClusterError::Read { path: path.to_owned(), why };
    let mut text = String::new();
    let file = File::open(path).map_err(|e| unreadable(e.to_string()))?;
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    if read.map_err(|e| unreadable(e.to_string()))? as u64 > MAX_BYTES {
        return Err(unreadable(format!("it has more than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// Checks that shares stand only where the strategy splits by them.
fn check_shares(
    strategy: Strategy,
    devices: &[DeviceConfig],
    sections: &[Section<'_>],
) -> Result<(), ClusterError> {
    let Some(first) = devices.iter().position(|d| d.share.is_some()) else { return Ok(()) };
    if strategy.takes_shares() {
        return Ok(());
    }
    Err(ClusterError::SharesWithoutUse { at: sections[first].place("share"), strategy })
}

#[cfg(test)]
mod tests;
