//! Directories of a worker's own, and caches that others may reach into.

use super::world::{Manner, Model, World, content, on_the_map, small};
use galaxy_model::{ModelDir, pieces::Pieces};
use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

const WEIGHTS: &str = "model.safetensors";

/// A copy of the coordinator's model, for `--models`: that directory, and the model's.
fn copied(world: &World, model: &Model) -> (PathBuf, PathBuf) {
    let models = world.dir.path().join("own");
    let path = models.join(model.dir.name());
    fs::create_dir_all(&path).unwrap();
    for file in ["config.json", WEIGHTS] {
        fs::copy(model.dir.path().join(file), path.join(file)).unwrap();
    }
    (models, path)
}

/// Writes 8 KiB of zeros into a matrix, where the fingerprint does not look. Returns the piece.
fn zeros(path: &Path, pieces: &Pieces) -> u32 {
    let model = ModelDir::open(path).unwrap();
    let fingerprint = model.fingerprint().to_owned();
    let file = File::options().read(true).write(true).open(path.join(WEIGHTS)).unwrap();
    let mut piece = Vec::new();
    for number in 0..pieces.count() {
        model.read_piece(pieces, number, &mut piece).unwrap();
        let bytes = fs::read(path.join(WEIGHTS)).unwrap();
        let middle = piece.len() / 3;
        let Some(wanted) = piece.get(middle..middle + (8 << 10)) else { continue };
        let Some(at) = bytes.windows(wanted.len()).position(|window| window == wanted) else {
            continue;
        };
        file.write_all_at(&vec![0; wanted.len()], at as u64).unwrap();
        if ModelDir::open(path).unwrap().fingerprint() == fingerprint {
            return number;
        }
        file.write_all_at(wanted, at as u64).unwrap();
    }
    panic!("the fingerprint is of all bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zeroed_weights_are_rejected_with_the_names_of_file_and_piece() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let (models, path) = copied(&world, &model);
    let flags = ["--cache-bytes", "0B", "--models", models.to_str().unwrap()];
    let worker = world.worker("d0", &flags).await;
    world.alone(&model, &worker, Manner::default()).await.0.unwrap();
    drop(worker);
    let piece = zeros(&path, &model.pieces);
    let worker = world.worker("d0", &flags).await;
    let fault = world.alone(&model, &worker, Manner::default()).await.0.unwrap_err();
    assert_eq!((fault.code.as_str(), fault.retryable), ("bad_model", false), "{fault}");
    let file = path.join(WEIGHTS).display().to_string();
    for want in [file, format!("piece {piece}, of the tensor")] {
        assert!(fault.message.contains(&want), "{fault}\nlacks {want}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_model_directory_is_replaced_by_pieces_of_the_coordinator() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let (models, path) = copied(&world, &model);
    zeros(&path, &model.pieces);
    let worker = world.worker("d0", &["--models", models.to_str().unwrap()]).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(ready.unwrap().fetched_bytes, model.pieces.total());
    assert_eq!(asked.pieces().len() as u32, model.pieces.count());
    let log = fs::read_to_string(world.log("d0")).unwrap();
    assert!(log.contains("is brought by the coordinator instead"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verified_pieces_are_remembered_until_a_file_changes() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let (models, path) = copied(&world, &model);
    let flags = ["--models", models.to_str().unwrap()];
    let worker = world.worker("d0", &flags).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!((ready.unwrap().fetched_bytes, asked.pieces().len()), (0, 0));
    assert!(*asked.manifest.lock().unwrap());
    let kept = content(&world.cache("d0")).join("own");
    let found = fs::read(&kept).unwrap();
    drop(worker);
    let worker = world.worker("d0", &flags).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(ready.unwrap().fetched_bytes, 0);
    assert!(!*asked.manifest.lock().unwrap(), "the manifest is kept");
    assert_eq!(fs::read(&kept).unwrap(), found, "the same pieces of the same files");
    drop(worker);
    // Changed, with the time set back to what it was.
    let file = File::options().write(true).open(path.join(WEIGHTS)).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    zeros(&path, &model.pieces);
    file.set_modified(time).unwrap();
    let worker = world.worker("d0", &flags).await;
    let (ready, _) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(ready.unwrap().fetched_bytes, model.pieces.total());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_is_private_to_its_user_or_rejected() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let cache = world.cache("d0");
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    // Somebody's folder, which is used for who knows what.
    fs::create_dir_all(&cache).unwrap();
    fs::set_permissions(&cache, Permissions::from_mode(0o755)).unwrap();
    let worker = world.worker("d0", &[]).await;
    let fault = world.alone(&model, &worker, Manner::default()).await.0.unwrap_err();
    let wanted = format!("`chmod 700 {}`", cache.display());
    assert!(fault.code == "bad_cache" && fault.message.contains(&wanted), "{fault}");
    drop(worker);
    fs::remove_dir(&cache).unwrap();
    let worker = world.worker("d0", &[]).await;
    world.alone(&model, &worker, Manner::default()).await.0.unwrap();
    drop(worker);
    assert_eq!((mode(&cache), mode(&content(&cache))), (0o700, 0o700));
    // A cache of an earlier version.
    for path in [&cache, &content(&cache)] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    let worker = world.worker("d0", &[]).await;
    let (ready, _) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(ready.unwrap().fetched_bytes, 0);
    drop(worker);
    assert_eq!((mode(&cache), mode(&content(&cache))), (0o700, 0o700));
    let log = fs::read_to_string(world.log("d0")).unwrap();
    assert!(log.contains("its mode is 700 now"), "{log}");
    // Data that lies elsewhere.
    let (data, elsewhere) = (content(&cache).join("data"), world.dir.path().join("data"));
    fs::rename(&data, &elsewhere).unwrap();
    symlink(&elsewhere, &data).unwrap();
    let worker = world.worker("d0", &[]).await;
    let fault = world.alone(&model, &worker, Manner::default()).await.0.unwrap_err();
    assert!(fault.code == "bad_cache" && fault.message.contains("symbolic link"), "{fault}");
    assert_eq!(on_the_map(&content(&cache)), model.pieces.count(), "it is as it was");
}
