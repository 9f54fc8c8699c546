"""Copy code to hosts: the project, the recipe and ttlaunch itself, equal everywhere or not at all.

In two steps. `make_release` reads what is to be copied on the launching machine and gives it a tree hash; then
`sync_release` brings it to all hosts at once, as `<remote folder>/releases/<tree hash>/`.

    from ttlaunch.hosts.sync.release import Release, make_release
    from ttlaunch.hosts.sync.data import DataItem, data_item
    from ttlaunch.hosts.sync.results import Outcome, Planned, Synced
    from ttlaunch.hosts.sync.send import sync_release
    from ttlaunch.hosts.sync.report import check_synced

    make_release(working_folder: Path, *, folder: Path | None = None, recipe: Path | None = None,
                 environment: Mapping[str, str] | None = None, on_progress: Callable[[int, int], None] | None = None,
                 ) -> tuple[Release | None, list[Diagnostic]]
        # S diagnostics; no Release where one of them is an error. `folder` is --folder, `recipe` the recipe's folder.
        # Release: .tree_hash, .files, .bytes (numbers), .project (the local root),
        #   .working_folder and .recipe: where the current folder and the recipe lie in the release, relative to it,
        #   such as `project/sub` and `package/ttlaunch/_recipes/pipeline_parallel`; .recipe is None without one.

    data_item(data: Mapping[str, Any]) -> DataItem     # takes `RecipeChoice.data`: path (None: default text), sha256, bytes

    sync_release(transports: Sequence[Transport], *, release: Release, data: Sequence[DataItem] = (),
                 remote_folder: str = "~/.ttlaunch", pythons: Sequence[str] = (),
                 interpreters: Mapping[str, Future[Process]] | None = None, keep: int = 3, dry_run: bool = False,
                 on_progress: Callable[[Progress], None] | None = None, timeout_s: float = 3600.0) -> Outcome
        # Connects where that has not been done. Called from one thread; on_progress is called from many.
        # Outcome.release: the release that was sent: a newer one if files changed on the way (made again, thrice at most);
        # Outcome.hosts: dict[host, Synced | Planned (dry_run) | HostError]; a SyncError is a HostError with a code S….
        # Synced: .host, .tree_hash, .remote_folder and .release (absolute paths on the host), .data {sha256: absolute path
        #   on the host}, .sent_bytes (as sent), .files, .seconds, .already_there, .pruned, .repaired, .differing_data

    check_synced(outcome: Outcome) -> list[Diagnostic]  # SyncErrors and warnings as S diagnostics; other HostErrors are
                                                        # left to whoever explains unreachable hosts
A run keeps its release by holding a shared flock on `contract.release_lock(tree_hash)` below the remote folder.
"""
