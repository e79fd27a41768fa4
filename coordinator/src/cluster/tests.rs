#![allow(clippy::unwrap_used)]

use super::*;

const GOOD: &str = r#"
[cluster]
name = "home"
model = "models/m"
identity = "keys/coordinator"
strategy = "galaxy"
wire = "f32"
tiles = 4

[[device]]
name = "pi-1"
address = "192.168.1.20:7100"
memory = "1.5GB"
threads = 2
share = 2.0

[[device]]
name = "pi-2"
address = "192.168.1.21:7100"
memory = "1GB"
"#;

fn with(from: &str, to: &str) -> Result<Cluster, ClusterError> {
    assert!(GOOD.contains(from), "{from}");
    Cluster::parse(&GOOD.replacen(from, to, 1), Path::new("/etc/galaxy"))
}

#[test]
fn a_valid_cluster_file_is_parsed() {
    let cluster = with("tiles = 4", "tiles = 4\ntimeout = \"2s\"\nqueue = 7").unwrap();
    assert_eq!(cluster.model, Path::new("/etc/galaxy/models/m"));
    assert_eq!(cluster.identity, Path::new("/etc/galaxy/keys/coordinator"));
    assert_eq!((cluster.queue, cluster.timeout), (7, Duration::from_secs(2)));
    assert_eq!(cluster.devices[0].memory, Bytes(1_500_000_000));
    assert_eq!(cluster.devices[0].threads, Some(2));
    assert_eq!(cluster.devices[1].share, None);
    assert!(cluster.by_hand());
    assert_eq!(cluster.listen, DEFAULT_LISTEN);
    assert_eq!(cluster.weights_format, None);
}

#[test]
fn the_weights_format_of_the_file_sets_the_quantisation() {
    let cluster = with("tiles = 4", "weights_format = \"q6\"").unwrap();
    assert_eq!(cluster.weights_format, Some(Quantisation::Q6));
    let refused = with("tiles = 4", "weights_format = \"q5\"").unwrap_err().to_string();
    assert!(refused.contains("cluster.weights_format") && refused.contains("q8, q6 and q4"));
}

#[test]
fn without_shares_the_split_is_by_profiles_with_strategy_auto() {
    let text = GOOD.replace("share = 2.0\n", "");
    let parse = |text: &str| Cluster::parse(text, Path::new("/etc/galaxy"));
    let cluster = parse(&text.replace("strategy = \"galaxy\"\n", "")).unwrap();
    assert!(!cluster.by_hand());
    assert_eq!((cluster.strategy, cluster.lengths.clone()), (Strategy::Auto, vec![128]));
    assert_eq!(cluster.texts, 1);
    assert_eq!(cluster.profiles, Path::new("/etc/galaxy/profiles"));
    assert_eq!(cluster.wires(), [WireType::F32]);
    assert_eq!(cluster.links(), [LinkType::Tls]);
    let more =
        "tiles = 8\nlengths = [64, 284]\ntexts = 32\nlossy = true\nplain = true\nprofiles = \"/p\"";
    let text = text.replace("wire = \"f32\"\ntiles = 4", more);
    let cluster = parse(&text).unwrap();
    assert_eq!((cluster.tiles, cluster.lengths.clone()), (Some(8), vec![64, 284]));
    assert_eq!(cluster.texts, 32);
    assert_eq!(cluster.profiles, Path::new("/p"));
    assert_eq!(cluster.wires(), [WireType::F32, WireType::F16]);
    assert_eq!(cluster.links(), [LinkType::Tls, LinkType::Plain]);
}

#[test]
fn activations_are_a16_unless_the_file_names_another_format() {
    let of = |more: &str| with("tiles = 4", more);
    assert_eq!(of("").unwrap().activations, Activations::A16);
    assert_eq!(of("activations = \"a8\"").unwrap().activations, Activations::A8);
    assert_eq!(of("activations = \"f32\"").unwrap().activations, Activations::F32);
    let error = of("activations = \"q8\"").unwrap_err().to_string();
    assert!(error.contains("known are a16 a8 f32"), "{error}");
}

#[test]
fn the_link_key_sets_which_link_types_are_allowed() {
    use LinkType::{Plain, Quic, Tls};
    let links = |more: &str| with("tiles = 4", more).unwrap().links();
    assert_eq!(links("link = \"tls\""), [Tls]);
    assert_eq!(links("link = \"quic\""), [Quic]);
    assert_eq!(links("link = \"plain\""), [Plain]);
    assert_eq!(links("link = \"auto\""), [Tls, Quic]);
    assert_eq!(links("link = \"quic\"\nplain = true"), [Quic, Plain]);
    assert_eq!(links("link = \"auto\"\nplain = true"), [Tls, Quic, Plain]);
}

#[test]
fn each_error_names_key_and_line() {
    let cases = [
        ("tiles = 4", "tile = 4", "line 8: cluster.tile is not a key: did you mean \"tiles\"?"),
        ("share = 2.0", "shares = 2.0", "device 1.shares is not a key: did you mean \"share\"?"),
        ("[cluster]", "[clusters]", "did you mean \"cluster\"?"),
        ("model = \"models/m\"\n", "", "line 2: [cluster] has no \"model\""),
        ("identity = \"keys/coordinator\"\n", "", "[cluster] has no \"identity\""),
        ("address = \"192.168.1.20:7100\"\n", "", "[device 1] has no \"address\""),
        ("memory = \"1GB\"\n", "", "[device 2] has no \"memory\""),
        ("name = \"pi-2\"\n", "", "[device 2] has no \"name\""),
        ("\"1.5GB\"", "\"1.5XB\"", "line 13: device 1.memory: \"1.5XB\" is not a size"),
        ("\"1.5GB\"", "1500", "device 1.memory must be a text in quotes"),
        ("\"1.5GB\"", "\"0GB\"", "grants nothing"),
        ("tiles = 4", "tiles = 0", "line 8: cluster.tiles = 0 is out of range: 1 to 64"),
        ("tiles = 4", "tiles = 65", "out of range: 1 to 64"),
        ("tiles = 4", "tiles = \"4\"", "cluster.tiles must be a whole number"),
        ("threads = 2", "threads = 0", "device 1.threads = 0 is out of range"),
        ("share = 2.0", "share = 0", "device 1.share = 0 is no weight"),
        ("share = 2.0", "share = -1.5", "is no weight"),
        ("share = 2.0", "share = nan", "is no weight"),
        ("share = 2.0", "share = inf", "is no weight"),
        ("\"galaxy\"", "\"ring\"", "known are auto local megatron galaxy sequence pipeline"),
        ("\"f32\"", "\"f8\"", "known are f32 f16"),
        ("pi-2", "pi-1", "line 18: device 2.name: the name pi-1 is used twice (first on line 11)"),
        ("pi-2", "Pi 2", "is not a name"),
        ("192.168.1.21:7100", "192.168.1.20:07100", "is used twice: pi-1 has it too"),
        (
            "192.168.1.20:7100",
            "127.0.0.1:7100",
            "line 12: device 1.address: device pi-1 is at 127.0.0.1:7100, which pi-2 cannot",
        ),
        ("192.168.1.21:7100", "[::1]:7100", "which pi-1 cannot reach: give its address on"),
        ("192.168.1.21:7100", "192.168.1.21", "is not an address: write host:port"),
        ("tiles = 4", "timeout = \"60\"", "is not a duration"),
        ("tiles = 4", "tiles = ", "line 8"),
        ("tiles = 4", "link = \"udp\"", "\"udp\" is not a link: known are tls plain quic"),
        ("tiles = 4", "plain = \"yes\"", "cluster.plain must be true or false"),
        (
            "strategy = \"galaxy\"",
            "strategy = \"auto\"",
            "line 15: device 1.share: strategy auto splits by profiles, and shares split by hand: leave the shares out",
        ),
        ("strategy = \"galaxy\"\n", "", "line 14: device 1.share: strategy auto"),
        (
            "strategy = \"galaxy\"",
            "strategy = \"pipeline\"",
            "strategy pipeline splits by profiles",
        ),
        ("tiles = 4", "lengths = [0]", "line 8: cluster.lengths = 0 is out of range: 1 to 512"),
        ("tiles = 4", "lengths = [513]", "cluster.lengths = 513 is out of range: 1 to 512"),
        ("tiles = 4", "lengths = []", "cluster.lengths must be a list of 1 to 16 whole numbers"),
        ("tiles = 4", "lengths = 128", "cluster.lengths must be a list of 1 to 16 whole numbers"),
        ("tiles = 4", "texts = 0", "line 8: cluster.texts = 0 is out of range: 1 to 65536"),
        ("tiles = 4", "lengths = [\"1\"]", "cluster.lengths must be a list of 1 to 16 whole"),
        ("tiles = 4", "lossy = 1", "cluster.lossy must be true or false"),
        (
            "tiles = 4",
            "weight_streaming = \"disk\"",
            "line 8: cluster.weight_streaming: \"disk\" is no way to read",
        ),
        ("tiles = 4", "drift = 0", "line 8: cluster.drift: 0 is no margin"),
        ("tiles = 4", "drift = nan", "NaN is no margin"),
        ("tiles = 4", "patience = \"0s\"", "\"0s\" is not a duration"),
    ];
    for (from, to, want) in cases {
        let error = with(from, to).expect_err(to).to_string();
        assert!(error.contains(want), "{to}: {error}");
    }
}

#[test]
fn a_cluster_on_one_machine_may_use_loopback() {
    let text = GOOD.replace("192.168.1.20:7100", "localhost:7100");
    let text = text.replace("192.168.1.21:7100", "127.0.0.1:7101");
    assert!(Cluster::parse(&text, Path::new(".")).is_ok());
}

#[test]
fn a_cluster_file_with_no_devices_or_too_many_is_refused() {
    let error = Cluster::parse("[cluster]\nmodel = \"m\"\nidentity = \"k\"\n", Path::new("."))
        .expect_err("none");
    assert_eq!(error, ClusterError::Devices { devices: 0 });
    let text = "[cluster]\nmodel = \"m\"\nidentity = \"k\"\nauthority = \"a\"\n";
    assert!(Cluster::parse(text, Path::new(".")).is_ok(), "they can join");
    let many = format!("device = [{}]", "{},".repeat(1000));
    let error = Cluster::parse(&many, Path::new(".")).expect_err("too many");
    assert_eq!(error, ClusterError::Devices { devices: 1000 });
}

/// The keys of the page's tables under a heading, each with its default.
fn documented(heading: &str) -> Vec<(&'static str, &'static str)> {
    let page = include_str!("../../../docs/cluster-file.md");
    let (_, section) = page.split_once(&format!("## {heading}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let row = |line: &'static str| {
        let (key, rest) = line.strip_prefix("| `")?.split_once("` | ")?;
        Some((key, rest.split(" | ").next()?))
    };
    section.lines().filter_map(row).collect()
}

#[test]
fn the_docs_list_every_key_of_a_cluster_file_and_no_other() {
    for (heading, known) in
        [("Keys of `[cluster]`", CLUSTER_KEYS), ("Keys of `[[device]]`", devices::KEYS)]
    {
        let mut listed: Vec<&str> = documented(heading).iter().map(|(key, _)| *key).collect();
        listed.sort_unstable();
        let mut known = known.to_vec();
        known.sort_unstable();
        assert_eq!(listed, known, "docs/cluster-file.md, {heading}");
    }
}

#[test]
fn the_docs_give_the_true_defaults_of_a_cluster_file() {
    const DEVICE: &str = "[[device]]\nname = \"a\"\naddress = \"10.0.0.1:7\"\nmemory = \"1GB\"\n";
    let parse = |more: &str, of_device: &str| {
        let text =
            format!("[cluster]\nmodel = \"m\"\nidentity = \"i\"\n{more}\n{DEVICE}{of_device}\n");
        Cluster::parse(&text, Path::new("/etc/galaxy"))
    };
    let without = parse("", "").unwrap();
    // A default that is a value of TOML; words like "none" stand for no value.
    let value = |default: &'static str| default.strip_prefix('`')?.strip_suffix('`');
    let mut compared = 0;
    for (key, default) in documented("Keys of `[cluster]`") {
        let Some(value) = value(default) else { continue };
        assert_eq!(parse(&format!("{key} = {value}"), "").as_ref(), Ok(&without), "{key}");
        compared += 1;
    }
    assert!(compared > 10, "{compared} defaults of the page are values");
    for (key, default) in documented("Keys of `[[device]]`") {
        let Some(value) = value(default) else { continue };
        assert_eq!(parse("", &format!("{key} = {value}")).as_ref(), Ok(&without), "{key}");
    }
}

#[test]
fn a_former_key_name_is_accepted_with_a_warning() {
    let good = with("tiles = 4", "tiles = 4\ncache_rows = 64\ncache = \"f16\"").unwrap();
    assert_eq!((good.kv_cache_tokens, good.kv_cache_format), (Some(64), CacheType::F16));
    let [format, tokens] = &good.warnings[..] else { panic!("{:?}", good.warnings) };
    assert_eq!(format, "line 10: cluster.cache is called kv_cache_format now: rename it");
    assert_eq!(tokens, "line 9: cluster.cache_rows is called kv_cache_tokens now: rename it");
    let both = with("tiles = 4", "cache_rows = 64\nkv_cache_tokens = 65");
    let error = both.expect_err("twice").to_string();
    let says = "line 8: cluster.cache_rows: this is the former name of kv_cache_tokens";
    assert!(error.contains(says), "{error}");
}
