"""Every limit, with its unit and the reason for it. Nothing from outside is unbounded.

Names carry the unit last. Limits that a run may choose are in the RunSpec; these hold for every run.
"""

KIB = 1024
MIB = 1024 * KIB

# Wire
message_bytes_max = 256 * KIB  # one signed message: 32 contributions and a certificate fit 20 times over
array_items_max = 4096  # longest list inside one message
string_bytes_max = 4 * KIB  # longest text inside one message
name_chars_max = 32  # a node's name: one table cell
body_bytes_max = 48 * KIB  # a log body with 32 contributions is about 8 KiB
run_spec_bytes_max = 4 * MIB  # 100,000 shards of 40 bytes
entries_per_message_max = 64  # a follower asks again; where entries are large, fewer (message_bytes_max / 2)
nesting_max = 16  # deepest message nesting in use is 5

# Data plane
chunk_bytes = 4 * MIB  # snapshots and shards travel in chunks of this size
chunks_max = 2048  # of one array, whose chunks grow beyond: the digests of two arrays fit in one message
blob_bytes_max = 4096 * MIB  # largest delta accepted at all; the model decides the real figure
delta_value_max = 1024.0  # magnitude of one value of a delta; working trainers stay below 1
zstd_window_bytes_max = 8 * MIB  # memory of one decompressor
frame_content_bytes_max = chunk_bytes  # content of one zstd frame: a shard's tokens
uploads_per_node_max = 4  # concurrent blobs served; then 503 with Retry-After and other donors
fetches_per_node_max = 4  # concurrent blobs fetched
oversize_bytes_max = 16 * MIB  # fetched beyond what a RunSpec allows, to see whose fault that is
receives_per_node_max = 16  # concurrent deltas taken from their senders
uploads_kept = 1  # of the blobs served at once: for peers that the log knows
receives_kept = 4  # of the deltas taken at once: for peers that the log knows
slots_per_address_max = 2  # bodies on their way to or from one address; local runs have no such share
known_address_s_max = 600.0  # an address counts as known so long after a peer was heard from it

# Protocol
contributions_max = 32  # deltas in one outer step
refused_max = 32  # refusals named in one outer step
words_waiting_max = 32  # owner's words that a voter keeps until they are certified; more is an owner's loop
in_flight_max = 2  # unsettled deltas of one node in a fragment (algorithm.md 3, bound on solo work)
pass_prolonged_factor = 4  # a prolonged pass: at most 4 H steps (algorithm.md 3)
headerless_s_max = 3600.0  # a delta that voters HAVE and whose header never came here is forgotten
snapshot_donors_max = 8  # peers asked for a snapshot, and offers compared
snapshot_ask_s_min = 1.0  # donors whose offers came before the entries are asked again after so long
snapshot_patience_heartbeats = 6  # nobody offers a snapshot for so long: apply the entries one by one
catch_up_versions_max = 16  # further behind than this a snapshot is cheaper than the entries
leave_s_max = 3.0  # a leaving voter waits so long for its seat to be handed over
term_jump_max = 1024  # terms that one message may skip: a liar cannot burn them all
terms_counted_max = 8  # terms for which votes are collected at once
bodies_remembered_max = 32  # bodies of proposals kept for certificates and re-proposals
prepared_max = 4  # candidate outer steps computed at once: each is two copies of the model
held_deltas_per_peer_max = 4  # a voter's memory for one sender's unlisted deltas
beats_min = 2  # heartbeats in the shortest timeout: one may be lost
committee_sizes = (1, 3, 5, 7)  # odd, so that no half can stand against the other; more only costs uploads
snapshot_every_versions = 16  # a newcomer replays at most this many outer steps
snapshots_kept = 2  # the newest may still be on its way to somebody when the next one is made
peers_max = 1024  # peers a node remembers
fanout = 3  # peers to which a receiver forwards a new certified entry
heartbeat_have_max = 64  # digests repeated in a heartbeat to mend lost HAVEs

# Rules state (bounded, so that a snapshot's third part fits in one message)
recent_entries_max = 64  # outer-step entries in which T_full may look back (algorithm.md 1)
recent_entries_min = 4  # and at least so many
norm_entries_max = 16  # outer-step entries whose norms help the clip (algorithm.md 4)
clocks_kept_max = 1024  # versions; 17 rounds at 4 to 32 versions a round are 68 to 544
revoked_max = 512  # peers an owner may revoke
trust_decay_shift = 10  # trust loses 1/1024 per outer step: half after 710
spreads_kept_max = 64  # arrivals remembered by the grace window (rules/closing.py)

# HTTP
connections_max = 512  # half of the usual limit of 1024 open files
connections_per_address_max = 64  # a household or a small cluster behind one address
header_timeout_s = 15.0  # keep-alive and slow headers
body_timeout_s = 600.0  # whole body of a blob
body_rate_bytes_per_s_min = 16 * KIB  # slower than this after the grace: cut off; large bodies need more
body_rate_grace_s = 5.0  # a slow start of a home link is no offence
request_timeout_s = 10.0  # a control message
full_store_retry_s = 30.0  # a full disk or store is rarely mended sooner
retry_after_s = 2.0  # about the time in which an upload slot becomes free
event_streams_max = 200  # open live pages
event_streams_per_address_max = 16  # browsers behind one address; a tab needs one

# Tracker
announce_interval_s = 30.0  # ordinary runs; local runs announce every 2 s
announce_expiry_intervals = 4.0  # silent for longer: offline
history_rows_max = 200_000  # rows of history kept by the tracker's database
reports_per_peer_per_minute_max = 120  # a node of a local run reports every second; twice that is noise

# Readers without a key, and downloads
log_readers_max = 8  # certified logs served at once: tens of megabytes each, for the owner, exports and forks
log_readers_kept = 2  # of these: for addresses that the log knows
log_readers_per_address_max = 1  # whoever reads slowly holds up nobody but the same household
reads_per_address_per_s = 1.0  # logs and lists of snapshots; a reader asks for each once
reads_per_address_burst = 16  # a household that exports at once
log_retry_s = 1.0  # a log that did not come is asked for again; a node answers so often
owner_wait_s_max = 86_400.0  # for a word to be followed: who waits longer looks again later
logs_read_at_once = 8  # by the owner's tool, of hosts that claim different states; a core checks two
rules_kept_entries = 256  # 20 KiB each: a reader of a log keeps every such state and makes those between
log_fetched_bytes_max = 2048 * MIB  # a log of 100,000 entries of 20 KiB; more is no log
downloads_max = 6  # files of checkpoints served at once: the tracker's line is for the swarm first
downloads_kept = 2  # of these: for addresses that the log knows
downloads_per_address_max = 2  # weights, and a small file beside them
downloads_per_address_per_s = 1.0  # begun; the files of one checkpoint are seven
downloads_per_address_burst = 30  # and downloaders with several connections begin at once
download_s_max = 4 * 3600.0  # of one file; who is slower goes on with a range
download_rate_bytes_per_s_min = 64 * KIB  # slower than this a slot is held for nothing
checkpoints_kept = 16  # the most that a tracker's host may have offered
checkpoint_store_bytes_max = 64 * 1024 * MIB  # of all that are offered
checkpoint_interval_s_min = 60.0  # between two; the run's last version is always offered
checkpoint_share = 0.1  # share of time spent on writing them
checkpoint_evaluation_s = 60.0  # a new one waits so long for the evaluation of its version
seed_max = 2**62 - 1  # of a run: torch and numpy take any of these

# Export and generation
weights_file_bytes_max = 5 * 10**9  # one safetensors file; the rest of the world cuts there, too
fetch_patience_s = 180.0  # an export gives up after so long without a new blob
tokenizer_bytes_max = 32 * MIB  # a tokenizer.json; the largest known have 20 MiB
card_contributors_max = 100  # named in a model card; all are in p2pdiloco.json
prompt_bytes_max = MIB  # of a prompt; a book
generated_tokens_max = 1_000_000  # of one command

# Simulation
simulated_seeds_max = 1_000_000  # seeds of one command: a day on two cores
simulated_chunk_seeds = 10  # seeds given to a process at a time

# One node's process
flight_recorder_bytes_max = 16 * MIB  # the last minutes of events, written down at a crash
events_waiting_max = 4096  # undigested messages before the server answers 503
loop_lag_s_max = 0.5  # the event loop was held up for longer: said once a minute
shutdown_s_max = 4.0  # from SIGTERM to the end of the process, with a second to spare (scenario E4)
catch_up_s_max = 300.0  # a starting node whose log does not grow for so long trains with what it has
run_over_linger_s = 8.0  # after the last entry a node serves the others for so long before it leaves

# Storage of one run on one machine
delta_store_bytes_max = 64 * 1024 * MIB  # deltas kept, parts of unfinished ones included
shard_store_bytes_max = 64 * 1024 * MIB  # training and evaluation shards
snapshot_store_bytes_max = 64 * 1024 * MIB  # chunks: `snapshots_kept` snapshots and one in the making
blob_part_age_s_max = 86400.0  # an unfinished blob older than this is removed at start
blob_parts_fetched_max = 32  # unfinished blobs of one purpose that this node fetches; each has a file open
blob_parts_put_max = 32  # unfinished deltas put here by peers that the log knows, and as many by strangers
blob_parts_per_peer_max = in_flight_max  # unfinished deltas of one sender; its oldest gives way
blob_part_spared_s = 10.0  # a part written to so lately never gives way to another sender's
blob_part_idle_s_max = 600.0  # a part without news for longer is dropped when another one begins
log_frame_bytes_max = message_bytes_max  # one entry in the log file
state_write_share = 0.1  # share of time spent on writing state files; deltas replay the rest
state_write_versions_max = 8  # outer steps between two state files at most: bounds the replay at start
prepared_steps_max = 2  # candidate outer steps held as arrays

# Planning a run
planned_nodes = 4  # of a small run: what a node fetches in a pass comes from the other three

# Traffic between peers
messages_per_peer_per_s = 20.0  # of one kind from one sender; heartbeats of the demo are 2 a second
messages_per_peer_burst = 100  # a committee that catches up says much at once
messages_per_address_per_s = 400.0  # before any signature is checked; a household shares an address
messages_per_address_burst = 2000  # a household that comes back at once, checked before any signature
heavy_messages_per_peer_per_s = 4.0  # kinds whose signatures cost a millisecond or more
heavy_messages_per_peer_burst = 32  # messages with many signatures inside, about 3 ms each
rate_buckets_max = 8192  # remembered senders; the longest idle is forgotten first
strikes_max = 40  # faults before a peer or an address is refused for `strike_ban_s`
strike_forgiven_s = 15.0  # one strike is forgiven after this time
strike_ban_s = 60.0  # long enough to stop a flood, short enough to forgive a broken build
send_queue_max = 64  # messages waiting for one peer; the oldest is dropped
send_backoff_s_max = 5.0  # pause after failures in a row
connect_timeout_s = 4.0  # three tries of a TCP handshake that lost its first packet
head_bytes_max = 8 * KIB  # one line or field of an HTTP head
error_bytes_max = 16 * KIB  # what is read of an answer that says no
fetch_rounds_max = 3  # times that all donors are asked before a fetch fails
retry_after_s_max = 10.0  # longest pause that another machine may ask for
upload_tries_max = 3  # offsets tried in one upload before the rules offer it again
io_bytes = 256 * KIB  # one read or write of a blob's body
announce_interval_local_s = 2.0  # local runs live for minutes; a page that lags 30 s would be useless
announce_peers_max = 64  # peer records in one reply: enough to join from, small enough for 300 replies/s
announce_keys_per_address_max = 64  # a household or a small cluster; fresh keys are free, addresses are not
offline_row_kept_s = 24 * 3600.0  # an offline node stays on the page this long
clock_offset_s_max = 15.0  # a node whose clock is further off is told so; nothing else depends on it

# Public page
text_chars_max = 120  # a sentence from a node on the page
loss_shown_max = 100.0  # nats per token: a guess among all tokens costs 12; more is a lie or a wreck
events_kept = 200  # in memory and JSON; the database keeps history_rows_max
events_shown = 20  # on the page
rounds_shown = 12  # the last outer steps on the page
points_kept = 8192  # versions in memory for the curve; older ones are thinned beyond it
evaluation_unsaid_s = 1.5  # pause before a report is said again, at first: a tracker may lag by an entry
evaluation_unsaid_s_max = 30.0  # and at most, to a tracker that is away or waits for others; it doubles
evaluations_due_max = 64  # newest evaluated versions for which a report is still taken
samples_kept = 8  # newest evaluated versions whose continuations are kept
sample_lines_max = 24  # of one continuation on the page
tracking_end_s = 1.0  # an ending process waits so long for TensorBoard and W&B, and twice so long at most
tracked_waiting_max = 4096  # points on their way to TensorBoard or W&B; more are left out
chart_points_max = 300  # points in one drawn curve and in the JSON: a pixel or two each
page_nodes_max = 200  # rows in the table; the JSON has all of them
metric_nodes_max = 256  # nodes with series of their own in /metrics
page_interval_s = 1.0  # one snapshot per this time for all readers together
stream_write_s_max = 10.0  # a reader that takes nothing for longer is dropped
data_age_s_max = 15.0  # older than this and the page is greyed

# Training on one node
trainer_frame_bytes_max = 32 * MIB  # one frame between daemon and trainer: 100,000 shard paths fit
trainer_report_s = 0.5  # between two reports of the trainer's progress
last_evaluation_s_max = 3600.0  # a node stays so long for the last evaluation; its figure is the run's result
evaluation_silent_s_max = 300.0  # an evaluation without progress is given up: as long as ranks wait
trainer_stop_s = 2.0  # the trainer is given so long to end by itself, then it is killed
collective_s_max = 300.0  # a rank waits so long for another: the slowest part of an inner step, or a compile
nice_max = 19  # of ranks that a machine lends; systems know no more, and less than 0 is for administrators
ranks_again_s = 3.0  # between two lives of the ranks that a machine lends
ranks_beat_s_max = 15.0  # while rank 0 has nothing to do: a rank lost on another machine is noticed then
ranks_stop_s = 5.0  # when one rank has failed the others are given so long to end, then they are killed
ranks_max = 256  # of one machine; nobody has as many GPUs
trainer_machines_max = 64  # of one node
trainer_stderr_lines = 20  # kept of what a trainer said before it crashed
trainer_crashes_max = 3  # within trainer_crash_window_s: the brake (scenario S18)
trainer_crash_window_s = 300.0  # crashes older than this are forgotten
trainer_not_finite_max = 3  # non-finite losses, gradients or deltas in a row, no good pass between: the brake
trainer_brake_s = 600.0  # first pause of the brake; doubles up to trainer_brake_s_max
trainer_brake_s_max = 4 * 3600.0  # a machine that was mended overnight is tried again in the morning
evaluation_tokens_max = 64 * KIB  # held-out tokens of one evaluation; of sources as many; in the protocol
evaluation_slice_s = 0.2  # an evaluation goes on for about so long between two inner steps
evaluation_slice_moves = 4  # and for so many times as long as moving the params in and out takes
evaluation_agrees_nats = 0.02  # what losses of one state differ by, between devices and their bf16
sample_chars_max = 1000  # of one continuation: 256 tokens of four letters; fits string_bytes_max
evaluations_waiting_max = 4  # asked for and not begun; the oldest gives way
genesis_reports_version_max = 64  # of version 0, where nobody is chosen, reports are taken until this version
checkpoint_passes = 16  # passes between two saves of the moments
checkpoint_s = 300.0  # seconds between them, whichever is first
shard_retry_s = 30.0  # a data shard that cannot be read is tried again after this time
data_window_shards = 16  # shards in use at once: 64 MiB; part of the data order, so the run's choice alone
shard_fetches_max = 3  # data shards fetched at once: of fetches_per_node_max one is left for deltas
shards_served_max = 3  # data shards served at once: of uploads_per_node_max one is left for deltas
window_patience_s = 20.0  # a starting trainer waits so long for the rest of its first window
shard_backoff_s_min = 1.0  # pause after a data shard could not be fetched, doubled with each try
shard_backoff_s_max = 60.0  # and no longer than this: donors come back
donor_avoided_s = 30.0  # a donor that did not answer, or lied, is asked behind all others for so long
data_disk_reserve_bytes = 256 * MIB  # left free on the disk by data, besides room for the states

# What an owner's key signed
ledger_bytes_max = MIB  # 2,000 runs of one owner at 500 bytes: numbers and the last word of each

# Making a run
model_config_bytes_max = 16 * KIB  # arguments of a config class; the longest known are 2 KiB
model_config_int_max = 2**24  # of a number in it: vocabularies and positions are below
model_config_float_max = 1e9  # of a number in it: rope_theta is up to 1e8
model_config_text_chars_max = 64  # of a text in it: names of activations and layer types
model_config_items_max = 1024  # of a list or table in it: one item for each layer
model_config_depth_max = 3  # of lists and tables in it: rope parameters by layer type
model_layers_max = 512  # the deepest known have 126
model_experts_max = 1024  # of a layer; the most known are 512
model_params_max = 2**36  # no machine holds 16 bytes each of more; what a node holds is for its plan to say
model_buffer_bytes_max = 256 * MIB  # what a model derives and nobody sends: masks, tables of positions
model_modules_max = 1_000_000  # of layers times experts: building them without memory takes a minute
param_max = 1e6  # magnitude of a param of version 0; sound models stay below 1e3
trial_tokens_max = 64  # of the sequence that tries a model: seconds for 1e9 parameters, minutes for 1e10
checkpoint_json_bytes_max = 16 * MIB  # a local checkpoint's config or index; 70 layers of experts: 4 MiB
logits_bytes = 256 * MIB  # float32 logits made at a time; training needs about four times as much for them
handed_over_values = 16 * MIB  # params moved at a time between host and device: 64 MiB
corpus_files_max = 100_000  # files of one corpus: a plan of some 20 MB
corpus_bytes_max = 64 * 1024 * MIB  # of text in one corpus: its shards fit every node's shard store
corpus_arguments_max = 256  # --data arguments; their numbers are kept with every document
corpus_line_bytes_max = 64 * MIB  # one line of JSON, or one cell of a table; a book is 1 MiB
document_bytes_max = 256 * KIB  # longer ones are cut at the end of a paragraph: 64 sequences of 1,024 tokens
broken_documents_share_max = 0.01  # of all documents; more is a file of another kind, or the wrong key
broken_documents_spared = 10  # so many are always passed over
broken_documents_first_max = 100  # a file that begins with so many, and nothing else, is of another kind
evaluation_share_max = 0.1  # of the corpus held out at most
evaluation_sources_max = 15  # evaluation sets of one source each; the RunSpec holds 16 in all
held_out_bytes_max = MIB  # of text in one evaluation set: four evaluations of BPE tokens, one frame
portion_bytes = 64 * MIB  # of text that one process reads at a time; in memory
bucket_bytes = 32 * MIB  # of text that one process orders and tokenises at a time; in memory
making_jobs_max = 64  # processes; each takes some 300 MB
making_told_s = 1.0  # between two looks at how far the making is
making_stop_s = 3.0  # from Ctrl-C: a call of a library that runs for longer is ended with its process
tokenizer_vocab_max = 2**18  # of a tokenizer trained here; more would be embeddings and little else
tokenizer_ids_max = 2**22  # of a tokenizer.json; the largest in use have 2**18
tokenizer_sample_bytes_max = 128 * MIB  # of text that a tokenizer is trained on; more changes few merges

# Lab
lab_file_bytes_max = MIB  # an experiment file is a page of text
lab_name_chars_max = 80  # of a study or an arm: one line
lab_runs_max = 4096  # arms times seeds of one command
lab_jobs_max = 256  # processes of one command
lab_message_bytes_max = 64 * MIB  # a result: 1,024 nodes and joiners at 200 bytes, twice over, and its curve
lab_told_s = 0.25  # a run says how far it is at most so often
lab_events_max = 2_000_000  # of a lab run without an outer step; a thousand nodes make 100,000 a pass
lab_cache_bytes_max = 1024 * MIB  # results kept for later; the oldest go first

# What a RunSpec may ask of the nodes that join: a stranger wrote it
run_tokens_max = 2**53  # whole numbers up to here are exact as float64, in which shares are computed
run_versions_max = 2**40  # outer steps; one in a millisecond for thirty years
run_seconds_min = 0.05  # of a pass or a heartbeat: peers take 20 messages of a kind in a second
inner_steps_max = 2**20  # of a pass; a day of twelve in a second
sequences_per_step_max = 2**16  # of an inner step; each is a forward pass where memory is short
sequence_tokens_max = 2**17  # of one sequence; longer contexts are trained in few places and never from home
step_tokens_max = 2**26  # of an inner step, whose batch takes 8 bytes a token; the largest known have as many
staleness_rounds_max = 64  # clocks_kept_max holds no more where a round has 16 versions
sample_prompts_max = 4  # a page's column
sample_prompt_chars_max = 400  # of one prompt; a paragraph
sample_prompt_tokens_max = 4 * sample_prompt_chars_max  # a character has up to four bytes, a token each
origin_chars_max = 120  # where version 0 comes from: a run's name or RunId with a version, or a few words
made_with_chars_max = 120  # releases of the libraries that made a run: names and numbers
window_sequences_max = 2**23  # of shards read at once: their order takes 40 bytes each in memory
frame_bytes_max = frame_content_bytes_max + 64 * KIB  # what does not compress grows by less than that

# A tokenizer.json, which may be a stranger's
tokenizer_parts_max = 16  # normalizers, pre-tokenizers or decoders in a sequence; the longest known has 6
tokenizer_nesting_max = 4  # of sequences in sequences; known ones have 2
tokenizer_growth_max = 64  # times that text may grow in bytes before it is cut into tokens, or behind
tokenizer_pattern_chars_max = 2000  # of a regular expression; the longest known has 400
tokenizer_repeats_max = 1000  # of a part of such an expression; known ones repeat three times
tokenizer_word_chars_max = 1000  # of a word for a WordPiece model, which tries all its parts; known have 100
tokenizer_added_bytes_max = MIB  # of all added tokens; the largest known have 100 KiB
tokenizer_tried_bytes = MIB  # of the corpus that is encoded and decoded again, to see what is lost
tokenizer_lost_share_max = 0.1  # of the letters in it; a model that never sees more of its text is a mistake
tokenizer_lost_share_said = 0.001  # from here on it is said; rare signs are unknown to many a tokenizer
tokenizer_pieces_bytes_max = 8 * MIB  # of all tokens of a Unigram model; the largest known have 3 MiB
token_text_bytes_max = 2048  # of one token as the file has it; the longest known have 512
