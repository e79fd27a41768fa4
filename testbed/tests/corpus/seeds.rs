//! Inputs that decoders accept: real files, and encodings of real values.

use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, Cache, ClusterProfile, DeviceName, DevicePlan,
    Epoch, Exchange, FrameHeader, Layout, LinkType, Mode, Modes, Plan, Rank, Segment,
    SequenceNumber, Span, Strategy, Wanted, WeightFormat, WireType,
};
use galaxy_graph::share::{Member, PlanOptions};
use galaxy_model::{
    Formats, ModelDir,
    manifest::Manifest,
    onnx::{NewAttribute, NewData, NewModel, NewNode, NewTensor},
    shape::Shape,
};
use galaxy_planner::synthetic::{self, SyntheticDevice};
use galaxy_proto::{
    convert,
    fault::{Fault, to_status},
    identity::Moment,
    join::{
        Attempt, Facts, Greeting, InvitationId, JoinLine, JoinRequest, Message, Pin, Proof,
        Refusal, Secret,
    },
    v1,
};
use galaxy_worker::ring::handshake::{Handshake, HandshakeReply, ProbeHandshake};
use prost::Message as _;
use std::{fs, ops::ControlFlow, path::Path};
use tonic::Code;

type Seed = (&'static str, String, Vec<u8>);

/// All seeds: target, name and bytes.
pub fn all() -> Vec<Seed> {
    let mut all = Vec::new();
    let mut add = |target: &'static str, name: &str, bytes: Vec<u8>| {
        all.push((target, name.to_owned(), bytes));
    };
    small(&mut add);
    models(&mut add);
    plans(&mut add);
    profiles(&mut add);
    messages(&mut add);
    texts(&mut add);
    served(&mut add);
    hub(&mut add);
    joining(&mut add);
    all
}

/// Adds messages of the joining protocol, and the line of an invitation.
fn joining(add: Add<'_>) {
    let greeting = Greeting { protocol: 9, version: "0.1.0".into(), time: Moment(1_800_000_000) };
    let facts = Facts {
        port: 7100.try_into().unwrap(),
        addresses: vec!["192.168.1.20".parse().unwrap(), "fd00::20".parse().unwrap()],
        memory: Bytes(1 << 30),
        threads: 4,
    };
    let ask = JoinRequest {
        invitation: InvitationId([1; 8]),
        wish: "pi-1".into(),
        request: vec![0x30; 200],
        proof: Proof([2; 32]),
    };
    let refusal = Refusal { code: "used".into(), message: "it has been used".into(), wait_s: 1 };
    let attempt = Attempt { address: "192.168.1.20:7100".parse().unwrap(), error: None };
    for (name, message) in [
        ("greeting", Message::Greeting(greeting)),
        ("announce", Message::Announce(facts)),
        ("ask", Message::Ask(ask)),
        ("refusal", Message::Refusal(refusal)),
        ("reached", Message::Reached(vec![attempt])),
    ] {
        add("join", name, numbered(0, &message.encode()));
    }
    let line = JoinLine {
        addresses: vec!["192.168.1.10:7000".into(), "[fd00::10]:7000".into()],
        pin: Pin([3; 16]),
        invitation: InvitationId([1; 8]),
        secret: Secret([4; 16]),
    };
    add("join", "line", numbered(2, line.text().as_bytes()));
}

type Add<'a> = &'a mut dyn FnMut(&'static str, &str, Vec<u8>);

/// Bytes behind a number that selects their kind.
fn numbered(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number], bytes].concat()
}

/// Bytes behind their length in two bytes, little endian.
fn piece(bytes: &[u8]) -> Vec<u8> {
    [&u16::try_from(bytes.len()).unwrap().to_le_bytes(), bytes].concat()
}

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn small(add: Add<'_>) {
    for (name, wire) in [("f32", WireType::F32), ("f16", WireType::F16)] {
        let (epoch, sequence) = (Epoch(3), SequenceNumber(9));
        let header = FrameHeader { epoch, sequence, transfer: 77, tile: 3, wire, payload: 4096 };
        add("frame", name, header.encode().to_vec());
    }
    let handshake = Handshake { epoch: Epoch(3), from: Rank(1), plan: [7; 32], name: name("pi-1") };
    add("handshake", "ring", handshake.encode().to_vec());
    let probe = ProbeHandshake { name: name("pi-1") };
    add("handshake", "probe", probe.encode().to_vec());
    add("handshake", "answer", HandshakeReply::Stale.encode().to_vec());
    let fault = Fault::new("overloaded", "the queue of 4 is full", true).of("pi-1");
    let status = to_status(Code::ResourceExhausted, fault);
    add("fault", "overloaded", numbered(8, status.details()));
    add("fault", "none", vec![14]);

    let segment =
        |slot, rows, wanted| Segment { slot, context_len: 0, cached: false, rows, wanted };
    let segments = vec![segment(0, 5, Wanted::Hidden), segment(1, 3, Wanted::LastLogits)];
    let shape = BatchShape::new(segments).unwrap();
    add("shape", "postcard", numbered(0, &postcard::to_stdvec(&shape).unwrap()));
    add("shape", "json", numbered(1, &serde_json::to_vec(&shape).unwrap()));
    let request = v1::ExecuteRequest { segments: convert::segments(&shape), ..Default::default() };
    let tokens = [&[2, 0, 0, 0, 0, 0, 0, 0, 8][..], &request.encode_to_vec()].concat();
    add("shape", "message", tokens);

    add("cluster", "by-hand", BY_HAND.as_bytes().to_vec());
    add("cluster", "by-profiles", BY_PROFILES.as_bytes().to_vec());
}

const BY_HAND: &str = r#"[cluster]
name = "home"
model = "models/m"
identity = "keys/coordinator"
strategy = "galaxy"
wire = "f16"
tiles = 4
timeout = "2.5s"
queue = 7

[[device]]
name = "pi-1"
address = "192.168.1.20:7100"
memory = "1.5GB"
threads = 2
share = 2.0

[[device]]
name = "pi-2"
address = "[fe80::1]:7100"
memory = "512MiB"
"#;

const BY_PROFILES: &str = r#"cluster = { model = "m", identity = 'k', listen = "0.0.0.0:7000",
    max_rows = 0x100, plain = true, lossy = false, lengths = [64, 128], profiles = "p", drift = 0.3 }
device = [
    { name = "a", address = "localhost:7100", memory = "2 GB" },
    { name = "b", address = "127.0.0.1:7101", memory = "2e3KiB" },
]
"#;

fn models(add: Add<'_>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let golden = root.join("testdata/golden");
    for family in ["bert", "distilbert", "gpt2", "gpt2-classes", "llama", "llama-tied-bf16"] {
        add("config", family, fs::read(golden.join(family).join("config.json")).unwrap());
    }
    let llama = galaxy_model::shape::catalogue().iter().find(|m| m.name == "llama-1b").unwrap();
    let dir = tempfile::tempdir().unwrap();
    llama.shape.write_config(dir.path()).unwrap();
    add("config", "llama3", fs::read(dir.path().join("config.json")).unwrap());

    let bert = Shape { layers: 1, hidden: 8, heads: 2, intermediate: 12, ..Shape::bert(1, 8, 2) };
    let bert = Shape { vocabulary: 5, positions: 6, kv_heads: 2, ..bert };
    for family in ["bert", "distilbert", "gpt2", "llama"] {
        let dir = tempfile::tempdir().unwrap();
        Shape { family, ..bert }.write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        let weights = header(&dir.path().join("model.safetensors"));
        let config = fs::read(dir.path().join("config.json")).unwrap();
        add("header", family, weights.clone());
        add("checkpoint", family, directory(&[(0, &config), (1, &weights)]));
    }
    let shards = golden.join("llama-tied-bf16");
    let file = |name: &str| fs::read(shards.join(name)).unwrap();
    add(
        "checkpoint",
        "shards",
        directory(&[
            (0, &file("config.json")),
            (2, &file("model.safetensors.index.json")),
            (3, &header(&shards.join("model-00001-of-00002.safetensors"))),
            (4, &header(&shards.join("model-00002-of-00002.safetensors"))),
        ]),
    );
    for name in ["tiny", "types"] {
        let file = golden.with_file_name("gguf").join(format!("{name}.gguf"));
        let file = fs::read(file).unwrap();
        add("gguf", name, file[..file.len().min(8192)].to_vec());
    }
    for (name, model) in networks() {
        add("onnx", name, model.bytes());
    }
    for model in ["vit", "llama-tied-bf16"] {
        let opened = ModelDir::open(&golden.join(model)).unwrap();
        let config = fs::read(golden.join(model).join("config.json")).unwrap();
        let manifest = Manifest::of(&opened, config, &mut |_, _| ControlFlow::Continue(()));
        add("manifest", model, manifest.unwrap().unwrap().to_bytes().unwrap());
    }
    let vit = |name: &str| fs::read(golden.join("vit").join(name)).unwrap();
    let (processor, png) = (vit("preprocessor_config.json"), vit("image.png"));
    add("image", "png", [piece(&processor), png].concat());
    add("image", "bicubic", [piece(BICUBIC), JPEG.to_vec()].concat());
    add("sentence", "plain", directory(&[]));
    add(
        "sentence",
        "flags",
        directory(&[(0, MODULES), (1, br#"{"pooling_mode_mean_tokens": true}"#), (3, LENGTHS)]),
    );
    add(
        "sentence",
        "names",
        directory(&[
            (0, MODULES),
            (1, br#"{"pooling_mode": ["lasttoken"]}"#),
            (4, br#"{"prompts": {"q": "query: "}, "default_prompt_name": "q"}"#),
        ]),
    );
    add(
        "sentence",
        "dense",
        directory(&[
            (0, STACK),
            (1, br#"{"pooling_mode": ["cls", "weightedmean"], "include_prompt": false}"#),
            (5, br#"{"in_features": 4, "out_features": 3, "bias": false}"#),
            (6, br#"{"linear.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}"#),
            (7, br#"{"dimension": 3}"#),
            (
                8,
                br#"{"norm.bias":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},
                "norm.weight":{"dtype":"F32","shape":[3],"data_offsets":[12,24]}}"#,
            ),
        ]),
    );
    add(
        "sentence",
        "arguments",
        directory(&[
            (0, br#"[{"path": "0_Transformer", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]"#),
            (1, br#"{"embedding_dimension": 2}"#),
            (9, br#"{"tokenizer_args": {"model_max_length": 9}, "modality_config": {"text": {"method": "forward"}}}"#),
            (4, br#"{"truncate_dim": 1, "model_type": "SentenceTransformer"}"#),
        ]),
    );
    add("tokenizer", "plain", directory(&[]));
    add(
        "tokenizer",
        "tokens",
        directory(&[
            (0, br#"{"tokenizer_class": "BertTokenizerFast", "do_lower_case": false, "model_max_length": 8,
                "added_tokens_decoder": {"5": {"content": "<x>", "lstrip": true, "special": true}},
                "extra_special_tokens": ["<y>"], "truncation_side": "left"}"#),
            (3, br#"{"model_type": "bert"}"#),
        ]),
    );
    add(
        "tokenizer",
        "older",
        directory(&[
            (0, br#"{"split_special_tokens": true, "model_input_names": ["input_ids"], "unk_token": "[UNK]"}"#),
            (1, br#"{"mask_token": {"content": "<m>", "lstrip": true}, "additional_special_tokens": ["<y>"]}"#),
            (2, br#"{"<z>": 9}"#),
        ]),
    );
}

const BICUBIC: &[u8] =
    br#"{"resample": 3, "size": {"height": 24, "width": 32}, "do_normalize": false}"#;
/// The beginning of a JPEG file.
const JPEG: &[u8] = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00";

const MODULES: &[u8] = br#"[{"path": "", "type": "sentence_transformers.models.Transformer"},
{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
{"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]"#;
const STACK: &[u8] = br#"[{"path": "", "type": "sentence_transformers.models.Transformer"},
{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
{"path": "2_Dense", "type": "sentence_transformers.models.Dense"},
{"path": "3_Norm", "type": "sentence_transformers.models.LayerNorm"}]"#;
const LENGTHS: &[u8] = br#"{"max_seq_length": 256, "do_lower_case": true}"#;

/// A directory of files by number, as the targets of directories read it.
fn directory(files: &[(u8, &[u8])]) -> Vec<u8> {
    files.iter().flat_map(|(number, bytes)| numbered(*number, &piece(bytes))).collect()
}

/// The JSON of a safetensors file's header.
fn header(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes[8..][..length as usize].to_vec()
}

fn plans(add: Add<'_>) {
    let spec = Shape { intermediate: 6, ..Shape::bert(2, 8, 4) }.spec().unwrap();
    let member = |name: &str, share| Member {
        name: self::name(name),
        budget: Bytes(1 << 40),
        threads: 1,
        share,
    };
    let members = [member("pi-1", 2.0), member("pi-2", 1.0)];
    for strategy in Strategy::ALL.into_iter().filter(|s| *s != Strategy::Auto) {
        let terms = PlanOptions {
            model: "m",
            fingerprint: "f",
            formats: &Formats::default(),
            strategy,
            wire: WireType::F32,
            tiles: 2,
            max_rows: 8,
            cache: Cache::NONE,
        };
        let plan = galaxy_graph::share::plan(&spec, &terms, &members).unwrap();
        add("plan", &strategy.to_string(), postcard::to_stdvec(&plan).unwrap());
    }
    let mixed = postcard::to_stdvec(&mixed()).unwrap();
    add("plan", "mixed", mixed.clone());
    let place = v1::PlaceRequest {
        epoch: 4,
        plan: mixed,
        rank: 0,
        peers: ["pi-1", "pi-2"]
            .map(|name| v1::Peer {
                name: name.into(),
                address: "10.0.0.1:7100".into(),
                plain_port: 7200,
            })
            .to_vec(),
        memory_bytes: 1 << 30,
    };
    add("worker", "place", numbered(0, &place.encode_to_vec()));
    // Every byte decides something.
    for seed in 0u32..24 {
        let dice = |n: u32| (n.wrapping_mul(2_654_435_761).rotate_left(7) >> 9) as u8;
        let bytes = (0..160).map(|n| dice(seed * 1000 + n));
        add("lower", &seed.to_string(), bytes.collect());
    }
}

/// Two devices; one layer is cut by rows, the other is not; direct exchange; a language head.
fn mixed() -> Plan {
    let modes = |layer, attention| Modes {
        layers: Span::new(layer, layer + 1),
        attention,
        mlp: Mode::Tensor,
    };
    let part = |from: u32| {
        let columns = Span::new(2 * from, 2 * from + 2);
        let block =
            |layer, heads| BlockAssignment { layers: Span::new(layer, layer + 1), heads, columns };
        Assignment {
            blocks: vec![block(0, Span::first(2)), block(1, Span::new(from, from + 1))],
            row_weight: 2 - from,
            vocabulary: Span::new(3 * from, 3 * from + 3),
        }
    };
    let device = |text: &str, from: u32| DevicePlan {
        name: name(text),
        budget: Bytes(1 << 40),
        threads: 1,
        prefill: part(from),
        decode: part(from),
        streaming: None,
    };
    Plan {
        model: "m".into(),
        fingerprint: "f".into(),
        strategy: Strategy::Auto,
        layout: Layout::Ring,
        modes: vec![modes(0, Mode::Sequence), modes(1, Mode::Tensor)],
        exchange: Exchange::Direct,
        link: LinkType::Plain,
        wire: WireType::F16,
        activations: galaxy_common::Activations::default(),
        tiles: 2,
        max_rows: 8,
        cache: Cache::NONE,
        ring: vec![device("pi-1", 0), device("pi-2", 1)],
    }
}

fn profiles(add: Add<'_>) {
    let device = |text: &str, gflops| SyntheticDevice {
        name: name(text),
        gflops,
        memory_rate: 10.0,
        memory: Bytes(1 << 30),
        threads: 1,
        link_rate: 1e8,
        latency: 50_000.0,
    };
    let devices = [device("pi-1", 20.0), device("pi-2", 10.0)];
    let spec = Shape::bert(1, 32, 2).spec().unwrap();
    let mut cluster = synthetic::profile(&spec, "s", WeightFormat::F32, &devices);
    // As few points as a table may have.
    for table in cluster.devices.iter_mut().flat_map(|device| &mut device.tables) {
        table.axes.iter_mut().for_each(|axis| axis.truncate(2));
        let points = table.axes.iter().map(Vec::len).product();
        table.nanos.truncate(points);
        table.spread.truncate(points);
    }
    let (one, links) = (&cluster.devices[0], &cluster.links);
    add("profile", "device", numbered(0, &postcard::to_stdvec(one).unwrap()));
    add("profile", "device-json", numbered(1, &serde_json::to_vec(one).unwrap()));
    add("profile", "link", numbered(2, &postcard::to_stdvec(&links[0]).unwrap()));
    add("profile", "links-json", numbered(3, &serde_json::to_vec(links).unwrap()));
    add("profile", "cluster", numbered(4, &postcard::to_stdvec(&cluster).unwrap()));
    let alone = ClusterProfile { devices: vec![one.clone()], links: Vec::new() };
    add("profile", "cluster-json", numbered(5, &serde_json::to_vec(&alone).unwrap()));
}

fn messages(add: Add<'_>) {
    let execute = v1::ExecuteRequest {
        epoch: 4,
        sequence: 5,
        digest: vec![7; 32],
        segments: convert::segments(&BatchShape::single(3, Wanted::Hidden).unwrap()),
        tokens: vec![1, 2, 300],
        timeout_ms: 2500,
        ..Default::default()
    };
    add("worker", "execute", numbered(1, &execute.encode_to_vec()));
    let peer = v1::Peer { name: "pi-2".into(), address: "10.0.0.2:7100".into(), plain_port: 0 };
    let link = "tls".to_owned();
    let probe = v1::ProbeRequest { peer: Some(peer), compute: true, link, bulk_ms: 0 };
    add("worker", "probe", numbered(2, &probe.encode_to_vec()));
    let profile = v1::ProfileRequest {
        model: "m".into(),
        fingerprint: "f".into(),
        threads: 2,
        max_rows: 512,
        memory_bytes: 1 << 30,
        activations: "a16".to_owned(),
    };
    add("worker", "profile", numbered(3, &profile.encode_to_vec()));

    let run = v1::RunRequest {
        sequences: vec![v1::Sequence { ids: vec![5, 17, 9], ..Default::default() }],
        output: v1::Wanted::LastLogits.into(),
        pooled: false,
    };
    add("coordinator", "run", numbered(0, &run.encode_to_vec()));
    add("coordinator", "timeout", numbered(1, b"200m"));
    let values = |n: usize| [1.5f32.to_le_bytes()].concat().repeat(n);
    let result = |output, offset, n| {
        let piece = v1::OutputPiece { output, offset, data: values(n).into() };
        v1::ExecuteEvent { event: Some(v1::execute_event::Event::Piece(piece)) }.encode_to_vec()
    };
    let results = [result(0, 0, 2), result(0, 8, 1), result(2, 0, 40)];
    add("coordinator", "results", numbered(2, &results.map(|r| piece(&r)).concat()));
    let times = |from: u64| {
        let start_ns: Vec<u64> = (0..40).map(|n| from + 10 * n).collect();
        let end_ns = start_ns.iter().map(|start| start + 7).collect();
        let reply = v1::TimelineReply { start_ns, end_ns }.encode_to_vec();
        [&[0; 8][..], &piece(&reply), &[1]].concat()
    };
    add("coordinator", "timelines", numbered(3, &[times(1000), times(2000)].concat()));
    let probed = v1::ProbeReply {
        round_trip_ns: vec![2e5, 3e5],
        rate: vec![1e8, 1.1e8, 9e7],
        busy_rate: vec![8e7],
        send_cost_ns: vec![0.5],
        receive_cost_ns: vec![0.7, 0.6],
        bytes: 1 << 20,
    };
    let probed = piece(&probed.encode_to_vec());
    add("coordinator", "probed", numbered(4, &probed));
    let texts = v1::EmbedRequest {
        texts: vec!["a lighthouse".into()],
        ids: vec![v1::TokenIds { ids: vec![5, 6] }],
        prompt_name: Some("query".into()),
        dimensions: 8,
        ..Default::default()
    };
    add("coordinator", "embed", numbered(5, &texts.encode_to_vec()));
    let description = v1::DescribeReply {
        protocol: galaxy_proto::PROTOCOL,
        name: "pi-1".into(),
        threads: 4,
        models: vec!["m".into()],
        engine: "cpu neon".into(),
        ..Default::default()
    };
    add("coordinator", "described", numbered(8, &description.encode_to_vec()));

    let report = v1::RequestReport {
        request: 7,
        epoch: 4,
        queue_ns: 10,
        execute_ns: 1_000_000,
        tokens: 3,
        programs: 1,
        devices: vec![v1::DeviceReport { device: "pi-1".into(), ..Default::default() }],
        ..Default::default()
    };
    use v1::run_event::Event;
    let events = [
        Event::Tensor(v1::TensorHead { sequence: 1, shape: vec![1, 2] }),
        Event::Data(values(2)),
        Event::Tensor(v1::TensorHead { sequence: 0, shape: vec![3] }),
        Event::Data(values(3)),
        Event::Report(report.clone()),
    ];
    let events = events.map(|event| piece(&v1::RunEvent { event: Some(event) }.encode_to_vec()));
    add("client", "tensors", [&[0, 2][..], &events.concat()].concat());
    let vectors = v1::EmbedReply { width: 2, vectors: values(6), report: Some(report.clone()) };
    add("client", "vectors", [&[1, 3][..], &vectors.encode_to_vec()].concat());
    let classes = v1::ClassifyReply {
        labels: vec!["yes".into(), "no".into()],
        logits: values(2),
        report: Some(report.clone()),
        probabilities: values(2),
    };
    add("client", "classes", [&[2, 1][..], &classes.encode_to_vec()].concat());
    let status = v1::StatusReply {
        cluster: "home".into(),
        devices: vec![v1::DeviceStatus { name: "pi-1".into(), heads_to: 4, ..Default::default() }],
        ..Default::default()
    };
    add("client", "status", numbered(3, &status.encode_to_vec()));
    let lane = v1::TraceLane { lane: "compute".into(), busy_ns: 5, idle_ns: 6 };
    let traced = v1::TraceDevice {
        device: "pi-1".into(),
        lanes: vec![lane],
        wall_ns: 11,
        awaiting_receive_ns: 3,
        bytes_received: 4096,
    };
    let trace = v1::TraceReply { chrome_json: "{}".into(), devices: vec![traced] };
    add("client", "trace", numbered(4, &trace.encode_to_vec()));
    add("client", "reports", numbered(5, &piece(&report.encode_to_vec()).repeat(2)));
}

fn texts(add: Add<'_>) {
    let sampling = v1::Sampling {
        temperature: Some(0.7),
        top_k: Some(40),
        top_p: Some(0.9),
        repetition_penalty: Some(1.1),
        logit_bias: vec![v1::LogitBias { token: 9, bias: -5.0 }],
        seed: Some(7),
        logprobs: 2,
        ..Default::default()
    };
    let ask = v1::GenerateRequest {
        prompt: "the sea".into(),
        max_tokens: 12,
        sampling: Some(sampling),
        stop: vec!["\n".into()],
        ..Default::default()
    };
    add("text", "ask", numbered(0, &ask.encode_to_vec()));
    let model_defaults = Some(v1::ModelDefaults { temperature: 1.0, max_tokens: 16 });
    let ids = vec![5, 17, 9];
    let generated = vec![300, 4];
    let ids = v1::GenerateRequest {
        ids,
        ignore_end: true,
        model_defaults,
        generated,
        ..Default::default()
    };
    add("text", "ask-ids", numbered(0, &ids.encode_to_vec()));
    let mut told = vec![0.0; galaxy_graph::program::TOKEN_VALUES as usize];
    told[..8].copy_from_slice(&[17.0, -0.5, 1.0, 2.0, 17.0, -0.5, 3.0, -1.5]);
    add("text", "token", numbered(1, &convert::bytes(&told)));
    use v1::generate_event::Event;
    let begun =
        v1::GenerateBegun { request: 3, prompt_tokens: 2, seed: 7, text: true, generated: 1 };
    let token = v1::GeneratedToken {
        token: 17,
        logprob: -0.5,
        top: vec![v1::Likely { token: 17, logprob: -0.5 }],
        text: " is".into(),
    };
    let report = Some(v1::RequestReport::default());
    let done = v1::GenerateDone { finish: "stop".into(), text: "e".into(), report };
    let events = [
        Event::Waiting(v1::GenerateWaiting::default()),
        Event::Begun(begun),
        Event::Token(token),
        Event::Done(done),
    ];
    let events = events.map(|event| v1::GenerateEvent { event: Some(event) }.encode_to_vec());
    add("text", "events", numbered(2, &events.map(|event| piece(&event)).concat()));
    let stops = [piece(b"END"), piece("€ur".as_bytes())].concat();
    add(
        "text",
        "end",
        [&[3, 2][..], &stops, b"\x02a E\x00N\x03X b \x02\xe2\x82\xac\x01ur"].concat(),
    );
    add("text", "end-tokens", numbered(4, br#"{"eos_token_id": [7, 9]}"#));
    let generation = br#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "stop_strings": ["x"],
        "suppress_tokens": [3], "max_length": 40, "num_beams": 2, "eos_token_id": 5}"#;
    add("text", "generation", numbered(4, generation));
    let config = br#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": [
        {"name": "default", "template": "{{ messages }}"}]}"#;
    add("text", "chat-files", [&[5, 1][..], &piece(config), &[0]].concat());
    let jinja = [&[5, 1][..], &piece(config), &[1], &piece(b"{{ bos_token }}")].concat();
    add("text", "chat-template", jinja);
}

fn served(add: Add<'_>) {
    let completion = br#"{"prompt": ["a", "b"], "max_tokens": 5, "temperature": 0.5, "top_k": -1, "seed": -1,
        "logit_bias": {"10": -100}, "stop": ["x"], "stream": true, "stream_options": {"include_usage": true}}"#;
    add("serve", "completion", numbered(0, completion));
    let ids =
        br#"{"prompt": [[1, 2], [3]], "stop": "y", "n": 1, "logprobs": null, "ignore_eos": true}"#;
    add("serve", "completion-ids", numbered(0, ids));
    let chat = br#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "who "}], "name": "b"},
        {"role": "assistant", "content": "me", "tool_calls": [{"function": {"name": "f"}}]}],
        "chat_template_kwargs": {"enable_thinking": false, "tools": [{"a": 1}]}, "response_format": {"type": "text"}}"#;
    for template in 0..3 {
        add("serve", &format!("chat-{template}"), [&[1, template][..], chat].concat());
    }
    let chat = br#"{"messages": [{"role": "user", "content": "%d %-H \u00e9 100%\n a", "reasoning": "x", "items": 1e22}],
        "chat_template_kwargs": {"sep": " ", "n": 4, "i": -3, "continue_final_message": true}}"#;
    add("serve", "chat-3", [&[1, 3][..], chat].concat());
    let chat = br#"{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]}]}"#;
    add("serve", "chat-arguments", [&[1, 1][..], chat].concat());
    let nulls = br#"{"messages": [{"role": "user", "content": "hi", "name": null, "tool_calls": null}],
        "chat_template_kwargs": null, "stream_options": {"include_usage": null}, "top_logprobs": 0, "logit_bias": null}"#;
    add("serve", "chat-nulls", [&[1, 0][..], nulls].concat());
    add(
        "serve",
        "embedding-ids",
        numbered(2, br#"{"input": [[1, 2], [3]], "encoding_format": null}"#),
    );
    let documents = br#"{"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": true}"#;
    add("serve", "rerank", numbered(4, documents));
    let vectors =
        br#"{"input": ["a", "b"], "encoding_format": "base64", "dimensions": 2, "truncate": true}"#;
    add("serve", "embedding", numbered(2, vectors));
    let template = b"{%- for m in messages %}{{ m.role | upper }}{% continue %}{% endfor %}";
    add("serve", "template", numbered(3, template));
    let template = b"{# {% raw %} #}{%- generation -%}{{ {'a': '}}'} }}{%- endgeneration +%}{% raw %}{% endgeneration %}{% endraw %}";
    add("serve", "template-generation", numbered(3, template));
}

fn hub(add: Add<'_>) {
    let listing = br#"{"sha": "c0ffee", "siblings": [{"rfilename": "config.json", "size": 3},
        {"rfilename": "2_Dense/model.safetensors"}, {"rfilename": "pytorch_model.bin"}, {"rfilename": "../x"}]}"#;
    add("hub", "listing", numbered(0, listing));
    let locations = ["https://cdn.example/a?x=1#y", "/api/./x/../y", "//cdn.example/a b", "?x=1"];
    for (number, location) in locations.into_iter().enumerate() {
        add("hub", &format!("location-{number}"), numbered(1, location.as_bytes()));
    }
    let headers = [
        "W/\"a9993e364706816aba3e25717850c26c9cd0d89d\"",
        "bytes 5-9/10",
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "\"api\";r=0;t=55",
    ];
    for (number, header) in headers.into_iter().enumerate() {
        add("hub", &format!("header-{number}"), numbered(2, header.as_bytes()));
    }
    let modules = br#"[{"idx": 0, "path": "0_Transformer"}, {"path": "1_Pooling/"}, {"path": ""}]"#;
    add("hub", "modules", numbered(3, modules));
    let index =
        br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x.safetensors"}}"#;
    add("hub", "index", numbered(4, index));
}

/// Networks as ONNX files: a small one of images, and the chain of nodes by which exporters work shapes out.
fn networks() -> [(&'static str, NewModel); 2] {
    let wholes = |values: &[i64]| NewAttribute::Wholes(values.to_vec());
    let node = |operator, inputs: &[&str], output| NewNode::new(operator, inputs, output);
    let elsewhere = NewData::External { location: "w".into(), offset: 64 };
    let images = NewModel {
        opset: 17,
        nodes: vec![
            node("Conv", &["x", "w", "b"], "c").with("pads", wholes(&[1, 1, 1, 1])),
            node("LeakyRelu", &["c"], "r").with("alpha", NewAttribute::Float(0.1)),
            node("MaxPool", &["r"], "p")
                .with("kernel_shape", wholes(&[2, 2]))
                .with("auto_pad", NewAttribute::Text("SAME_UPPER".into())),
            node("Resize", &["p", "", "scales"], "y"),
        ],
        tensors: vec![
            NewTensor { data: elsewhere, ..NewTensor::floats("w", &[2, 3, 3, 3], &[]) },
            NewTensor::floats("b", &[2], &[0.5, 1.0]),
            NewTensor::floats("scales", &[4], &[1.0, 1.0, 2.0, 1.5]),
        ],
        inputs: vec![("x".into(), vec![None, Some(3), Some(5), Some(4)])],
        outputs: vec!["y".into()],
    };
    let shapes = NewModel {
        opset: 13,
        nodes: vec![
            node("Shape", &["x"], "shape"),
            node("Slice", &["shape", "zero", "one"], "batch"),
            node("Concat", &["batch", "rest"], "to").with("axis", NewAttribute::Whole(0)),
            node("Reshape", &["x", "to"], "flat"),
            node("Split", &["flat", "parts"], "a").with("axis", NewAttribute::Whole(1)),
            node("Softmax", &["a"], "y"),
        ],
        tensors: vec![
            NewTensor::wholes("zero", &[0]),
            NewTensor::wholes("one", &[1]),
            NewTensor::wholes("rest", &[-1]),
            NewTensor::wholes("parts", &[60]),
        ],
        ..images.clone()
    };
    [("images", images), ("shapes", shapes)]
}
